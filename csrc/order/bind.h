#pragma once

#include <nanobind/nanobind.h>

void bind_order(nanobind::module_& m);
