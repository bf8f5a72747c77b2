#pragma once

#include <nanobind/nanobind.h>

void bind_io(nanobind::module_& m);
