// Bindings of runtime::Exchange in flux._core.

#include <pybind11/pybind11.h>

#include <algorithm>

#include "bindings/checks.h"
#include "bindings/core.h"
#include "runtime/exchange.h"

namespace py = pybind11;

namespace flux::bindings {
namespace {

using runtime::Exchange;

// Checks sizes. m * n is limited like a number of columns, because a matrix may be treated as one row.
void check_matrix(int m, int n, int world_size) {
  check_world_size(world_size);
  check_range("m", m, 1, kMaxExtent);
  check_range("n", n, 1, kMaxExtent);
  check_range("m * n", static_cast<int64_t>(m) * n, 1, kMaxExtent);
}

void check_exchange(int m, int n, int world_size, Exchange::Mode mode) {
  check_matrix(m, n, world_size);
  check_multiple("n", n, "8", Exchange::kVector);
  check_range("mode", static_cast<int>(mode), 0, static_cast<int>(Exchange::Mode::kScatter));
  if (mode == Exchange::Mode::kScatter) check_shards(m, "n", n, world_size);
}

Exchange exchange(int m, int n, int world_size, Exchange::Mode mode) {
  check_exchange(m, n, world_size, mode);
  return runtime::make_exchange(m, n, world_size, mode);
}

Exchange row_exchange(int m, int n, int world_size, Exchange::Mode mode) {
  check_exchange(m, n, world_size, mode);
  return runtime::make_row_exchange(m, n, world_size, mode);
}

// Accepts any matrix, also one that is too large for an Exchange.
Exchange::Mode all_reduce_mode(int64_t m, int64_t n, int world_size) {
  constexpr int64_t kMax = int64_t{1} << 48;
  check_world_size(world_size);
  check_range("m", m, 1, kMax);
  check_range("n", n, 1, kMax);
  return runtime::all_reduce_mode(m, n, world_size);
}

int64_t contribution(const Exchange& self, int source, int owner, int row, int column) {
  check_rank("source", source, self.world_size);
  check_rank("owner", owner, self.world_size);
  check_range("row", row, 0, self.m - 1);
  // An owner at the edge may have no columns; its first column is then after the last column.
  check_range("column", column, 0, std::max<int64_t>(self.n - 1, self.first_column(owner)));
  return self.contribution(source, owner, row, column);
}

int64_t result(const Exchange& self, int row, int column) {
  check_range("row", row, 0, self.m - 1);
  check_range("column", column, 0, self.n - 1);
  return self.result(row, column);
}

int64_t int8_scatter_bytes(int rows, int n, int world_size) {
  check_matrix(rows, n, world_size);
  return runtime::Int8Scatter{rows, n, world_size}.bytes();
}

}  // namespace

void bind_exchange(py::module_& m) {
  py::enum_<Exchange::Mode>(m, "ExchangeMode", "How ranks sum what each of them has.")
      .value("ONE_SHOT", Exchange::Mode::kOneShot)
      .value("TWO_SHOT", Exchange::Mode::kTwoShot)
      .value("SCATTER", Exchange::Mode::kScatter);
  py::class_<Exchange>(m, "Exchange", "Where the vectors of a matrix [m, n] go that ranks sum.")
      .def_readonly("m", &Exchange::m)
      .def_readonly("n", &Exchange::n)
      .def_readonly("world_size", &Exchange::world_size)
      .def_readonly("mode", &Exchange::mode)
      .def_readonly("shard", &Exchange::shard, "Columns (two-shot) or rows (scatter) of an owner, else 0.")
      .def_property_readonly("slot_rows", &Exchange::slot_rows, "Of what one source sends one owner.")
      .def_property_readonly("slot_columns", &Exchange::slot_columns)
      .def_property_readonly("contribution_bytes", &Exchange::contribution_bytes)
      .def_property_readonly("bytes", &Exchange::bytes,
                             "Of the exchange area of a rank, for 2-byte elements.")
      .def("first_row", &of_rank<Exchange, &Exchange::first_row>, py::arg("rank"))
      .def("first_column", &of_rank<Exchange, &Exchange::first_column>, py::arg("rank"))
      .def("columns_of", &of_rank<Exchange, &Exchange::columns_of>, py::arg("rank"),
           "Columns that a rank sums.")
      .def("contribution", &contribution, py::arg("source"), py::arg("owner"), py::arg("row"),
           py::arg("column"), "Byte offset in the owner's area.")
      .def("result", &result, py::arg("row"), py::arg("column"),
           "Byte offset, in every rank's area, of a sum that its owner sends.");
  m.def("exchange", &exchange, py::arg("m"), py::arg("n"), py::arg("world_size"), py::arg("mode"));
  m.def("row_exchange", &row_exchange, py::arg("m"), py::arg("n"), py::arg("world_size"), py::arg("mode"),
        "Of the same matrix as one row, of which two-shot owners get whole rows of the matrix.");
  m.def("int8_scatter_bytes", &int8_scatter_bytes, py::arg("rows"), py::arg("n"), py::arg("world_size"),
        "Of the exchange area of a rank that sums `rows` rows whose contributions travel as int8.");
  m.def("all_reduce_mode", &all_reduce_mode, py::arg("m"), py::arg("n"), py::arg("world_size"),
        "One-shot or two-shot, whichever should be done sooner.");
}

}  // namespace flux::bindings
