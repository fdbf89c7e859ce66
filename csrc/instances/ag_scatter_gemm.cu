#include "moe/arriving_rows.cuh"
#include "moe/grouped_launch.cuh"

FLUX_KERNELS(flux::moe::GroupedFamily<flux::moe::ArrivingRows, false>)
