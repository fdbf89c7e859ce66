// The mixture-of-experts part of flux._core. Arrays come as addresses of CPU tensors: the Python side
// (flux/moe/routing.py) makes them, in the sizes of the layout.

#include "bindings/moe_core.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "moe/plan.h"
#include "moe/routing.h"
#include "moe/tile_choice.h"

namespace py = pybind11;

namespace flux::bindings {
namespace {

void expect(bool good, const std::string& what) {
  if (!good) throw py::value_error(what);
}

moe::Layout make_layout(int world_size, int rank, int ep_size, int num_experts, int top_k, int max_tokens) {
  expect(world_size >= 1 && world_size <= moe::kMaxSteps, "world_size: expected 1 to 8");
  expect(rank >= 0 && rank < world_size, "rank: expected one of the group");
  expect(ep_size >= 1 && world_size % ep_size == 0, "ep_size: expected a divisor of world_size");
  expect(num_experts >= 1 && num_experts % ep_size == 0, "num_experts: expected a multiple of ep_size");
  expect(top_k >= 1 && top_k <= moe::kMaxTopK, "top_k: expected 1 to 16");
  expect(max_tokens >= 0 && static_cast<int64_t>(max_tokens) * world_size * top_k <= INT32_MAX / 2,
         "max_tokens: expected less than 2**30 choices of all ranks");
  return {world_size, rank, ep_size, num_experts, top_k, max_tokens};
}

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Addresses in the order of RoutingArrays.
void route(const moe::Layout& layout, int block_m, uint64_t ids, const std::vector<uint64_t>& arrays) {
  expect(block_m >= 1, "block_m: expected a positive number");
  expect(arrays.size() == 10, "arrays: expected 10 addresses");
  const auto words = [&](int i) { return pointer<int32_t>(arrays[i]); };
  const moe::RoutingArrays out = {words(0), words(1), words(2),
                                  words(3), words(4), words(5),
                                  words(6), words(7), pointer<moe::TileEntry>(arrays[8]),
                                  words(9)};
  py::gil_scoped_release release;
  moe::route_on_host(layout, block_m, pointer<const int32_t>(ids), out);
}

std::vector<std::tuple<int, int, int>> tiles(uint64_t entries, int num_entries, int n_tiles) {
  std::vector<std::tuple<int, int, int>> all;
  for (int index = 0; index < num_entries * n_tiles; ++index) {
    const moe::Tile tile = moe::tile_at(pointer<const moe::TileEntry>(entries), n_tiles, index);
    all.emplace_back(tile.expert, tile.m, tile.n);
  }
  return all;
}

std::vector<std::tuple<int, int>> column_chunks(int n, int block_n) {
  expect(n >= 1 && block_n >= 1, "n, block_n: expected positive numbers");
  const moe::ColumnChunks chunks = moe::make_chunks(n, block_n);
  std::vector<std::tuple<int, int>> all;
  for (int chunk = 0; chunk < chunks.count(); ++chunk) {
    all.emplace_back(chunks.first(chunk), chunks.size(chunk));
  }
  return all;
}

// All units of an order, as it numbers them.
template <class Order>
std::vector<std::tuple<int, int, int>> units_of(const Order& order) {
  std::vector<std::tuple<int, int, int>> all;
  for (int index = 0; index < order.units(); ++index) {
    const auto [first, second, third] = order.at(index);
    all.emplace_back(first, second, third);
  }
  return all;
}

std::vector<std::tuple<int, int, int>> comm_units(int world_size, int rank, int blocks, int chunks) {
  expect(world_size >= 1 && rank >= 0 && rank < world_size && blocks >= 1 && chunks >= 1,
         "comm_units: expected a rank of the group, and positive numbers");
  return units_of(moe::CommOrder{world_size, rank, blocks, chunks});
}

}  // namespace

void bind_moe(py::module_& m) {
  using moe::Layout;
  m.attr("MOE_MAX_TOP_K") = moe::kMaxTopK;
  m.attr("MOE_MAX_ROUTE_EXPERTS") = moe::kMaxRouteExperts;
  py::class_<Layout>(m, "MoeLayout", "How tokens and experts are distributed over the ranks of a group.")
      .def(py::init(&make_layout), py::arg("world_size"), py::arg("rank"), py::arg("ep_size"),
           py::arg("num_experts"), py::arg("top_k"), py::arg("max_tokens"))
      .def_readonly("world_size", &Layout::world_size)
      .def_readonly("rank", &Layout::rank)
      .def_readonly("ep_size", &Layout::ep_size)
      .def_readonly("num_experts", &Layout::num_experts)
      .def_readonly("top_k", &Layout::top_k)
      .def_readonly("max_tokens", &Layout::max_tokens, "Of one rank.")
      .def_property_readonly("local_experts", &Layout::local_experts)
      .def_property_readonly("max_rows", &Layout::max_rows)
      .def_property_readonly("route_ctas", &moe::route_ctas, "Of the routing kernel; all must be resident.")
      .def_property_readonly("route_scratch_words", &moe::route_scratch_words)
      .def_property_readonly("route_exchange_bytes", &moe::route_exchange_bytes)
      .def("max_tiles", &Layout::max_tiles, py::arg("block_m"))
      .def("slice_of", &Layout::slice_of, py::arg("rank"))
      .def("step_of", &Layout::step_of, py::arg("source"))
      .def_static("slot_index", &Layout::slot_index, py::arg("src"), py::arg("owner"))
      .def_static("blocks_of", &Layout::blocks_of, py::arg("slot_rows"), py::arg("block_rows"),
                  "Blocks of that many slot rows in layer 1, each with a signal.")
      .def_static("block_rows", &Layout::block_rows, py::arg("max_tokens"), "Slot rows of such a block.");
  using moe::SendOrder;
  py::class_<SendOrder>(m, "MoeSendOrder", "The order in which the tokens of a rank travel in layer 0.")
      .def(py::init(&moe::make_send_order), py::arg("layout"))
      .def_readonly("parts", &SendOrder::parts)
      .def_readonly("part_tokens", &SendOrder::part_tokens,
                    "Neighbours of which those of a share leave together.")
      .def_property_readonly(
          "ends",
          [](const SendOrder& order) { return std::vector<int>(order.ends, order.ends + order.shares); },
          "Of each share: one behind the experts whose tokens have left with it.")
      .def_property_readonly("units", &units_of<SendOrder>, "[(share, part, peer)]")
      .def_property_readonly("early_experts", &SendOrder::early_experts,
                             "Those whose tiles of own tokens are computed first.")
      .def_property_readonly("signals", &SendOrder::signals)
      .def("signal", &SendOrder::signal, py::arg("share"), py::arg("part"));
  m.def("moe_route", &route, py::arg("layout"), py::arg("block_m"), py::arg("ids"), py::arg("arrays"),
        "Fill the arrays of a routing (csrc/moe/routing.h) from the expert ids of all ranks' tokens.");
  m.def("moe_tiles", &tiles, py::arg("entries"), py::arg("num_entries"), py::arg("n_tiles"),
        "[(expert, m_tile, n_tile)] in the order in which they are computed.");
  m.def("moe_column_chunks", &column_chunks, py::arg("n"), py::arg("block_n"),
        "[(first n_tile, number of n_tiles)] of layer 1.");
  m.def("moe_tile", &moe::choose_grouped_config, py::arg("num_rows"), py::arg("experts"), py::arg("n"),
        py::arg("k"), py::arg("num_sms"), "Id of the tile shape of a grouped GEMM.");
  m.def("moe_comm_units", &comm_units, py::arg("world_size"), py::arg("rank"), py::arg("blocks"),
        py::arg("chunks"), "[(chunk, peer, block)] in the order in which layer 1 sends and sums.");
  m.def("moe_communication_ctas", &moe::communication_ctas, py::arg("expected_rows"), py::arg("own_tokens"),
        py::arg("experts"), py::arg("n"), py::arg("k"), py::arg("world_size"), py::arg("num_sms"),
        "How many CTAs of layer 1 begin with communication.");
}

}  // namespace flux::bindings
