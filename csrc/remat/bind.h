#pragma once

#include <nanobind/nanobind.h>

void bind_remat(nanobind::module_& m);
