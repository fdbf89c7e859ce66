#include "moe/grouped_launch.cuh"

FLUX_KERNELS(flux::moe::GroupedFamily<flux::moe::OrderedRows, true>)
FLUX_KERNELS(flux::moe::GroupedFamily<flux::moe::ScaledIndexedRows, true>)
