// Deliberate defects, only in builds with FLUX_SANITIZE. tests/cpu/kernels/test_sanitizers.py runs each of them and expects a
// report, which proves that the sanitizers work.

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/core.h"

namespace flux::bindings {
namespace {

// `volatile` keeps the compiler from seeing the defect and removing it.
int planted_defect(const std::string& kind) {
  volatile int zero = 0;
  std::vector<int> heap(4, 1);
  const volatile int* const words = heap.data();
  if (kind == "none") return words[zero];
  if (kind == "read behind the end of an array") return words[4 + zero];
  if (kind == "read before the start of an array") return words[-1 + zero];
  if (kind == "use after free") {
    const volatile int* const freed = words;
    std::vector<int>().swap(heap);
    return freed[zero];
  }
  if (kind == "signed overflow") return INT_MAX - zero + words[0];
  if (kind == "product of two extents") return (1 << 16) * ((1 << 16) + zero);
  if (kind == "misaligned access") {
    return *reinterpret_cast<const volatile int*>(reinterpret_cast<const volatile char*>(words) + 1 + zero);
  }
  if (kind == "division by zero") return words[0] / zero;
  if (kind == "float out of range") return static_cast<int>(1e30 + zero);
  throw py::value_error("kind: expected a planted defect, got " + kind);
}

}  // namespace

void bind_planted(py::module_& m) { m.def("planted_defect", &planted_defect, py::arg("kind")); }

}  // namespace flux::bindings
