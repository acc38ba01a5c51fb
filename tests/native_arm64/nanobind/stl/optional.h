#include "nanobind/nanobind.h"
