// The parts of flux._core.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "gemm/plan.h"

namespace flux::bindings {

namespace py = pybind11;

// What a wait without the GIL calls now and then: throws if the user interrupts it.
inline void check_signals() {
  const py::gil_scoped_acquire hold;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A method that takes its arguments as an array: pybind11's calls take several times as long.
template <class Self, PyObject* (Self::*kMethod)(PyObject* const* args, Py_ssize_t count)>
PyObject* call_method(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    return (py::handle(self).cast<Self&>().*kMethod)(args, count);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Self, PyObject* (Self::*kMethod)(PyObject* const* args, Py_ssize_t count)>
void add_method(py::class_<Self>& type, const char* name, const char* doc) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call_method<Self, kMethod>)),
      METH_FASTCALL, doc};
  auto* const of = reinterpret_cast<PyTypeObject*>(type.ptr());
  type.attr(name) = py::reinterpret_steal<py::object>(PyDescr_NewMethod(of, &method));
}

// The version, why there are no kernels (empty if there are some), their CUDA, and the commit (empty if unknown).
extern const char* const kBuildFacts[4];

void bind_known_calls(py::module_& m);
void bind_moe(py::module_& m);
// Defects that a sanitizer must report. Only in builds with FLUX_SANITIZE.
void bind_planted(py::module_& m);

// ---- argument checks, before flux._core multiplies, divides or indexes ----
//
// Sizes are checked. Addresses are trusted, because C++ cannot check what they point to.

constexpr int kMaxExtent = (1 << 30) - 1;  // of M, N and K: the bytes of a row of 16 bits fit into 32 bits
// Maximum number of tiles of a problem: three CTAs for each, counted in tenths, fit into 32 bits.
constexpr int64_t kMaxTiles = 1 << 26;
constexpr int64_t kMaxListed = 1 << 21;  // maximum length of a returned list
constexpr int kMaxSms = 1 << 16;

inline void check_range(const std::string& what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw py::value_error(what + ": expected " + std::to_string(low) + " to " + std::to_string(high) +
                          ", got " + std::to_string(value));
  }
}

inline void check_extent(const std::string& what, int64_t value) { check_range(what, value, 1, kMaxExtent); }

inline void check_index(const std::string& what, int64_t index, int64_t count) {
  check_range(what, index, 0, count - 1);
}

inline void check_multiple(const std::string& what, int64_t value, const std::string& of, int64_t divisor) {
  if (value % divisor != 0)
    throw py::value_error(what + ": expected a multiple of " + of + ", got " + std::to_string(value));
}

inline uint64_t checked_word(const char* what, uint64_t address) {
  if (address == 0 || address % sizeof(uint32_t) != 0) {
    throw py::value_error(std::string(what) + ": expected an address, a non-null multiple of 4, got " +
                          std::to_string(address));
  }
  return address;
}

inline void check_world_size(int world_size) {
  check_range("world_size", world_size, 1, runtime::kMaxWorldSize);
}

template <class Layout, int (Layout::*of)(int) const>
int of_rank(const Layout& self, int rank) {
  check_index("rank", rank, self.world_size);
  return (self.*of)(rank);
}

inline void check_shards(int m, const char* columns_name, int columns, int world_size) {
  check_world_size(world_size);
  check_extent("m", m);
  check_extent(columns_name, columns);
  check_multiple("m", m, "world_size " + std::to_string(world_size), world_size);
}

// Checks the result of a GEMM: at most kMaxTiles tiles of 64 columns, the narrowest.
inline void check_problem(int m, int n, int world_size) {
  check_shards(m, "n", n, world_size);
  const int64_t m_tiles = gemm::ceil_div(m / world_size, gemm::kBlockM);
  check_range("tiles of [m, n]", world_size * m_tiles * gemm::ceil_div(n, 64), 1, kMaxTiles);
}

// The index of the slot of `src` on `owner`. A rank has no slot for itself.
inline int checked_slot_index(int src, int owner) {
  check_index("src", src, runtime::kMaxWorldSize);
  check_index("owner", owner, runtime::kMaxWorldSize);
  if (src == owner) throw py::value_error("src: expected another rank than owner " + std::to_string(owner));
  return runtime::slot_index(src, owner);
}

}  // namespace flux::bindings
