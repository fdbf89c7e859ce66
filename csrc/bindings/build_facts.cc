// What the build was told about itself (core.h). In a source of its own: compilers' caches then share all other objects of
// _core between builds with and without kernels, and between commits.
namespace flux::bindings {

extern const char* const kBuildFacts[4];
const char* const kBuildFacts[4] = {FLUX_VERSION, FLUX_BUILD_NOTE, FLUX_CUDA_VERSION, FLUX_COMMIT};

}  // namespace flux::bindings
