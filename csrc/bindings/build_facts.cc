#include "bindings/build_facts.h"

namespace flux::bindings {

BuildFacts build_facts() { return {FLUX_VERSION, FLUX_BUILD_NOTE, FLUX_CUDA_VERSION, FLUX_COMMIT}; }

}  // namespace flux::bindings
