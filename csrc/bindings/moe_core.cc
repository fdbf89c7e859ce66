// The mixture-of-experts part of flux._core. Arrays are passed as addresses of CPU tensors, which Python
// (flux/moe/routing.py) allocates with the sizes of the layout.

#include <pybind11/stl.h>

#include <tuple>

#include "bindings/core.h"
#include "moe/routing.h"

using namespace pybind11::literals;

namespace flux::bindings {
namespace {

constexpr int kMaxExperts = 1 << 20;
constexpr int kMaxChoices = (1 << 30) - 1;  // maximum number of choices of all ranks' tokens

moe::Layout make_layout(int world_size, int rank, int ep_size, int num_experts, int top_k, int max_tokens) {
  check_world_size(world_size);
  check_index("rank", rank, world_size);
  check_range("ep_size", ep_size, 1, world_size);
  if (world_size % ep_size != 0) {
    throw py::value_error("ep_size: expected a divisor of world_size " + std::to_string(world_size) +
                          ", got " + std::to_string(ep_size));
  }
  check_range("num_experts", num_experts, 1, kMaxExperts);
  check_multiple("num_experts", num_experts, "ep_size " + std::to_string(ep_size), ep_size);
  check_range("top_k", top_k, 1, moe::kMaxTopK);
  check_range("max_tokens", max_tokens, 0, kMaxChoices / (world_size * top_k));
  return {world_size, rank, ep_size, num_experts, top_k, max_tokens};
}

int checked_max_tiles(const moe::Layout& self, int block_m) {
  check_extent("block_m", block_m);
  return self.max_tiles(block_m);
}

int blocks_of(int slot_rows, int block_rows) {
  check_range("slot_rows", slot_rows, 0, kMaxExtent);
  check_extent("block_rows", block_rows);
  return moe::Layout::blocks_of(slot_rows, block_rows);
}

int block_rows(int max_tokens) {
  check_range("max_tokens", max_tokens, 0, kMaxExtent);
  return moe::Layout::block_rows(max_tokens);
}

int send_signal(const moe::SendOrder& self, int share, int part) {
  check_index("share", share, self.shares);
  check_index("part", part, self.parts);
  return self.signal(share, part);
}

// Converts the address of an array of words, which may be null if the array is empty.
template <class T>
T* pointer(const char* what, uint64_t address, bool empty) {
  return reinterpret_cast<T*>(empty && address == 0 ? 0 : checked_word(what, address));
}

// `arrays`: addresses in the order of RoutingArrays.
void route(const moe::Layout& layout, int block_m, uint64_t ids, const std::vector<uint64_t>& arrays) {
  check_extent("block_m", block_m);
  check_range("len(arrays)", static_cast<int64_t>(arrays.size()), moe::kRoutingArrays, moe::kRoutingArrays);
  const bool empty = layout.max_tokens == 0;
  const moe::RoutingArrays out = moe::routing_arrays(
      [&](int i) { return pointer<void>("arrays", arrays[i], /*empty=*/i < 8 && empty); });
  const auto* choices = pointer<const int32_t>("ids", ids, empty);
  py::gil_scoped_release release;
  moe::route_on_host(layout, block_m, choices, out);
}

std::vector<std::tuple<int, int, int>> tiles(uint64_t address, int num_entries, int n_tiles) {
  check_range("num_entries", num_entries, 0, kMaxListed);
  check_range("n_tiles", n_tiles, 1, kMaxListed);
  check_range("num_entries * n_tiles", static_cast<int64_t>(num_entries) * n_tiles, 0, kMaxListed);
  const auto* entries = pointer<const moe::TileEntry>("entries", address, num_entries == 0);
  std::vector<std::tuple<int, int, int>> all;
  for (int index = 0; index < num_entries * n_tiles; ++index) {
    // The array may be no valid schedule, so its values are checked.
    const moe::TileEntry& entry = entries[index / n_tiles];
    check_range("size of a group in entries", entry.size, 1, moe::kGroupM);
    check_range("base of a group in entries", entry.base, 0, index / n_tiles);
    check_range("first_m of a group in entries", entry.first_m, 0, kMaxExtent);
    const moe::Tile tile = moe::tile_at(entries, n_tiles, index);
    all.emplace_back(tile.expert, tile.m, tile.n);
  }
  return all;
}

std::vector<std::tuple<int, int>> column_chunks(int n, int block_n) {
  check_extent("n", n);
  check_extent("block_n", block_n);
  const moe::ColumnChunks chunks = moe::make_chunks(n, block_n);
  std::vector<std::tuple<int, int>> all;
  for (int i = 0; i < chunks.count(); ++i) all.emplace_back(chunks.first(i), chunks.size(i));
  return all;
}

template <class Order>
std::vector<std::tuple<int, int, int>> units_of(const Order& order) {
  check_range("units", order.units(), 0, kMaxListed);
  std::vector<std::tuple<int, int, int>> all;
  for (int index = 0; index < order.units(); ++index) {
    const auto [first, second, third] = order.at(index);
    all.emplace_back(first, second, third);
  }
  return all;
}

std::vector<std::tuple<int, int, int>> comm_units(int world_size, int rank, int blocks, int chunks) {
  check_world_size(world_size);
  check_index("rank", rank, world_size);
  check_range("blocks", blocks, 1, kMaxListed);
  check_range("chunks", chunks, 1, kMaxListed);
  check_range("units", static_cast<int64_t>(blocks) * chunks * world_size, 1, kMaxListed);
  return units_of(moe::CommOrder{world_size, rank, blocks, chunks});
}

void check_grouped(int experts, int n, int k, int operand_bytes) {
  check_range("experts", experts, 1, kMaxExperts);
  check_extent("n", n);
  check_extent("k", k);
  check_range("operand_bytes", operand_bytes, 1, 2);
}

int choose_tile(int64_t num_rows, int experts, int n, int k, int num_sms, int operand_bytes) {
  check_grouped(experts, n, k, operand_bytes);
  check_range("num_rows", num_rows, 0, kMaxChoices);
  check_range("num_sms", num_sms, 1, kMaxSms);
  return moe::choose_grouped_config(num_rows, experts, n, k, num_sms, operand_bytes);
}

int communication_ctas(int64_t expected_rows, int64_t own_tokens, int experts, int n, int k, int world_size,
                       int num_sms, int operand_bytes) {
  check_grouped(experts, n, k, operand_bytes);
  check_range("expected_rows", expected_rows, 0, kMaxChoices);
  check_range("own_tokens", own_tokens, 0, kMaxChoices);
  check_world_size(world_size);
  check_range("num_sms", num_sms, 0, kMaxSms);  // CPUs have none
  return moe::communication_ctas(expected_rows, own_tokens, experts, n, k, world_size, num_sms,
                                 operand_bytes);
}

}  // namespace

void bind_moe(py::module_& m) {
  using moe::Layout;
  m.attr("MOE_MAX_TOP_K") = moe::kMaxTopK;
  py::class_<Layout>(m, "MoeLayout", "How tokens and experts are distributed over the ranks of a group.")
      .def(py::init(&make_layout), "world_size"_a, "rank"_a, "ep_size"_a, "num_experts"_a, "top_k"_a,
           "max_tokens"_a)
      .def_readonly("world_size", &Layout::world_size)
      .def_readonly("rank", &Layout::rank)
      .def_readonly("ep_size", &Layout::ep_size)
      .def_readonly("num_experts", &Layout::num_experts)
      .def_readonly("top_k", &Layout::top_k)
      .def_readonly("max_tokens", &Layout::max_tokens, "Of one rank.")
      .def_property_readonly("local_experts", &Layout::local_experts)
      .def_property_readonly("max_rows", &Layout::max_rows)
      .def_property_readonly("route_ctas", &moe::route_ctas, "Of the routing kernel; all must be resident.")
      .def("route_fits", &moe::route_fits, "num_sms"_a,
           "Whether they leave enough SMs to kernels of others that wait for peers, such as NCCL's.")
      .def_property_readonly("max_route_experts",
                             [](const Layout& l) { return moe::max_route_experts(moe::route_threads(l)); })
      .def_property_readonly("route_scratch_words", &moe::route_scratch_words)
      .def_property_readonly("route_exchange_bytes", &moe::route_exchange_bytes)
      .def("max_tiles", &checked_max_tiles, "block_m"_a)
      .def("slice_of", &of_rank<Layout, &Layout::slice_of>, "rank"_a)
      .def("step_of", &of_rank<Layout, &Layout::step_of>, "source"_a)
      .def_static("slot_index", &checked_slot_index, "src"_a, "owner"_a)
      .def_static("blocks_of", &blocks_of, "slot_rows"_a, "block_rows"_a, "In layer 1, each with a signal.")
      .def_static("block_rows", &block_rows, "max_tokens"_a, "Slot rows of such a block.");
  using moe::SendOrder;
  py::class_<SendOrder>(m, "MoeSendOrder", "The order in which the tokens of a rank travel in layer 0.")
      .def(py::init(&moe::make_send_order), "layout"_a)
      .def_readonly("parts", &SendOrder::parts)
      .def_readonly("part_tokens", &SendOrder::part_tokens)
      .def_property_readonly(
          "ends",
          [](const SendOrder& order) { return std::vector<int>(order.ends, order.ends + order.shares); },
          "Of each share: one behind the experts whose tokens have left with it.")
      .def_property_readonly("units", &units_of<SendOrder>, "[(share, part, peer)]")
      .def_property_readonly("early_experts", &SendOrder::early_experts, "Whose own tokens come first.")
      .def_property_readonly("signals", &SendOrder::signals)
      .def("signal", &send_signal, "share"_a, "part"_a);
  m.def(
      "moe_route", &route, "layout"_a, "block_m"_a, "ids"_a, "arrays"_a,
      "Fill the arrays of a routing (csrc/moe/routing.h), of the sizes of the layout, from all ranks' ids.");
  m.def("moe_tiles", &tiles, "entries"_a, "num_entries"_a, "n_tiles"_a,
        "[(expert, m_tile, n_tile)] in order. The address is trusted, what lies there is not.");
  m.def("moe_column_chunks", &column_chunks, "n"_a, "block_n"_a, "[(first n_tile, n_tiles)] of layer 1.");
  m.def("moe_tile", &choose_tile, "num_rows"_a, "experts"_a, "n"_a, "k"_a, "num_sms"_a, "operand_bytes"_a = 2,
        "Id of the tile shape of a grouped GEMM.");
  m.def("moe_comm_units", &comm_units, "world_size"_a, "rank"_a, "blocks"_a, "chunks"_a,
        "[(chunk, peer, block)] in the order in which layer 1 sends and sums.");
  m.def("moe_communication_ctas", &communication_ctas, "expected_rows"_a, "own_tokens"_a, "experts"_a, "n"_a,
        "k"_a, "world_size"_a, "num_sms"_a, "operand_bytes"_a = 2,
        "How many CTAs of layer 1 begin with communication.");
}

}  // namespace flux::bindings
