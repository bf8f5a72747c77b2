#pragma once

#include <nanobind/nanobind.h>

void bind_quant(nanobind::module_& m);
