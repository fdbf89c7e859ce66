// csrc needs no more of it than the interface of the runtime.
#pragma once

#include "cuda_runtime_api.h"
