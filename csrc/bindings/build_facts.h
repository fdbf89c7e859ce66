// What the build was told about itself. In a source of its own: compilers' caches then share all other objects of
// _core between builds with and without kernels, and between commits.
#pragma once

namespace flux::bindings {

struct BuildFacts {
  const char* version;
  const char* why_no_kernels;  // empty if there are some
  const char* cuda_version;    // of the kernels
  const char* commit;          // empty if unknown
};

BuildFacts build_facts();

}  // namespace flux::bindings
