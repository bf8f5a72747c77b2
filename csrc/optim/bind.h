#pragma once

#include <nanobind/nanobind.h>

void bind_optim(nanobind::module_& m);
