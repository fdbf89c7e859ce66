// flux._core: the part of the native code that needs neither torch nor CUDA. Plans, tile orders and exchanges come from
// the same headers as in the kernels, so CPU tests enumerate exactly what a GPU does.

#include "bindings/core.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <tuple>

#include "ag_gemm/plan.h"
#include "gemm/swap_ab.h"
#include "gemm_rs/plan.h"
#include "runtime/host_atomics.h"

using namespace pybind11::literals;

namespace flux::bindings {
namespace {

using runtime::Exchange;
// Of each tile its owner, and m and n inside the owner's shard.
using RankTiles = std::vector<std::optional<std::tuple<int, int, int>>>;

const gemm::TileConfig& config_at(int config) {
  check_index("config", config, gemm::kNumTileConfigs);
  return gemm::kTileConfigs[config];
}

const gemm::SwapAbConfig& swap_ab_at(int tile) {
  check_index("tile", tile, gemm::kNumSwapAbConfigs);
  return gemm::kSwapAbConfigs[tile];
}

// ---- atomics ----------------------------------------------------------------------------------------------

uint32_t wait_at_least(uint64_t address, uint32_t epoch, double timeout_s) {
  checked_word("addr", address);
  if (!(timeout_s >= 0.0))
    throw py::value_error("timeout_s: expected a number of seconds, got " + std::to_string(timeout_s));
  const std::chrono::duration<double> seconds(std::min(timeout_s, 1e9));
  const auto timeout = std::chrono::duration_cast<runtime::Clock::duration>(seconds);
  const py::gil_scoped_release release;
  return runtime::wait_at_least(address, epoch, timeout, check_signals);
}

// The fields in the order of ErrorRecord, or None while no wait has run out of time.
py::object read_error(uint64_t address) {
  checked_word("addr", address);
  if (runtime::load_acquire(address + offsetof(runtime::ErrorRecord, code)) == 0) return py::none();
  const auto& record = *reinterpret_cast<const runtime::ErrorRecord*>(address);
  return py::make_tuple(record.op, record.rank, record.peer, record.tile, record.expected, record.seen);
}

// ---- workspaces -------------------------------------------------------------------------------------------

runtime::SymmBuffer make_symm_buffer(int rank, int world_size, const std::vector<uint64_t>& peers,
                                     int64_t signal_bytes, int64_t slot_bytes, int64_t exchange_bytes,
                                     uint64_t error, uint64_t timeout_ns) {
  // Signals are counted in 32 bits. The sum of any of these sizes and an address must fit into 64 bits.
  constexpr int64_t kMaxSignalBytes = int64_t{4} * INT32_MAX, kMaxSlotBytes = int64_t{1} << 48;
  check_world_size(world_size);
  check_index("rank", rank, world_size);
  check_range("len(peers)", static_cast<int64_t>(peers.size()), world_size, world_size);
  check_range("signal_bytes", signal_bytes, 0, kMaxSignalBytes);
  check_range("slot_bytes", slot_bytes, 0, kMaxSlotBytes);
  check_range("exchange_bytes", exchange_bytes, 0, kMaxSlotBytes);
  auto* const record = reinterpret_cast<runtime::ErrorRecord*>(error);
  runtime::SymmBuffer buffer = {rank,       world_size,     {},     signal_bytes,
                                slot_bytes, exchange_bytes, record, timeout_ns};
  std::copy(peers.begin(), peers.end(), buffer.peers);
  return buffer;
}

// ---- plans ------------------------------------------------------------------------------------------------

std::string tile_name(const gemm::TileConfig& tile) {
  return gemm::config_name(tile.id, gemm::Cluster::kNone);
}

gemm::Choice checked_select(const gemm::Problem& problem, int config) {
  check_problem(problem.m, problem.n, problem.world_size);
  check_extent("k", problem.k);
  check_range("num_sms", problem.num_sms, 1, kMaxSms);
  check_range("config", config, -1, INT32_MAX);
  if (config >= 0 && (config & 0xff) >= gemm::kFirstSwapAb) {
    check_range("config", config & 0xff, gemm::kFirstSwapAb,
                gemm::kFirstSwapAb + gemm::kNumSwapAbConfigs - 1);
    check_range("split in config", config >> 8 & 0xff, 0, gemm::kMaxSplit);
    const bool in_pairs = gemm::kSwapAbConfigs[(config & 0xff) - gemm::kFirstSwapAb].in_pairs;
    check_range("CTAs that share a weight in config", config >> 16 & 0xff, 0, in_pairs ? 2 : 1);
  } else if (config >= 0) {
    config_at(config & 0xff);
    check_range("cluster in config", config >> 8 & 0xff, 0, static_cast<int>(gemm::Cluster::kSplit3));
  }
  try {
    return gemm::select(problem, config);
  } catch (const runtime::Error&) {
    throw py::value_error("config: expected a tile and cluster that the problem and its " +
                          std::to_string(problem.num_sms) + " SMs allow, got " + std::to_string(config));
  }
}

std::string choice_name(const gemm::Choice& choice) {
  return choice.swaps_ab() ? gemm::swap_ab_name(choice.config, choice.split, choice.sharers)
                           : tile_name(gemm::kTileConfigs[choice.config]);
}

gemm_rs::Layout gemm_rs_layout(int m, int n, int world_size, int config) {
  check_problem(m, n, world_size);
  return gemm_rs::make_layout(m, n, world_size, config_at(config));
}

// Limits group_m to the number of tile rows, which gives the same order, so that products fit into 32 bits.
int checked_group_m(int group_m, const gemm_rs::Layout& layout) {
  check_extent("group_m", group_m);
  return std::min(group_m, layout.world_size * layout.m_tiles);
}

gemm::Cluster checked_cluster(int cluster) {
  check_range("cluster", cluster, 1, static_cast<int>(gemm::Cluster::kPairN));
  return static_cast<gemm::Cluster>(cluster);
}

int64_t tile_offset(const gemm_rs::Layout& self, int slot, int m_tile, int n_tile) {
  check_index("slot", slot, self.world_size - 1);
  check_index("m_tile", m_tile, self.m_tiles);
  check_index("n_tile", n_tile, self.n_tiles);
  return self.tile_offset(slot, m_tile, n_tile);
}

int signal_index(const gemm_rs::Layout& self, int m_tile, int n_tile, int half) {
  check_index("m_tile", m_tile, self.m_tiles);
  check_index("n_tile", n_tile, self.n_tiles);
  check_range("half", half, 0, 1);
  return self.signal_index(m_tile, n_tile, half);
}

// `idle`: also null for each CTA of a cluster that has no tile.
RankTiles all_tiles(const gemm::TileOrder& order, bool idle = false) {
  check_range("tiles", order.num_clusters() * order.cluster_size(), 1, kMaxListed);
  RankTiles tiles;
  for (int index = 0; index < order.num_clusters(); ++index) {
    for (int cta = 0; cta < order.cluster_size(); ++cta) {
      const gemm::Tile tile = order.at(index, cta);
      if (tile.valid) tiles.push_back(std::tuple(tile.shard, tile.m, tile.n));
      if (!tile.valid && idle) tiles.push_back(std::nullopt);
    }
  }
  return tiles;
}

RankTiles gemm_rs_tiles(int m, int n, int world_size, int rank, int config, int cluster, int group_m,
                        bool copied, bool idle) {
  const gemm_rs::Layout layout = gemm_rs_layout(m, n, world_size, config);
  check_index("rank", rank, world_size);
  gemm::TileOrder order =
      gemm_rs::make_order(layout, rank, checked_cluster(cluster), checked_group_m(group_m, layout), copied);
  if (world_size == 1) order.peers = gemm::Peers::kOneByOne;  // kTakeTurns divides by the number of peers
  return all_tiles(order, idle);
}

std::pair<std::vector<std::pair<int, int>>, std::vector<int>> gemm_rs_chunks(int count, int tiles) {
  check_range("tiles", tiles, 1, kMaxListed);
  check_range("count", count, 1, tiles);
  const gemm_rs::Chunks chunks = {count, tiles};
  std::vector<std::pair<int, int>> all;
  for (int chunk = 0; chunk < count; ++chunk) all.emplace_back(chunks.first(chunk), chunks.size(chunk));
  std::vector<int> of_tiles;
  for (int tile = 0; tile < tiles; ++tile) of_tiles.push_back(chunks.of(tile));
  return {all, of_tiles};
}

int copy_chunks(int m, int n, int k, int world_size, int operand_bytes) {
  check_problem(m, n, world_size);
  check_extent("k", k);
  check_range("operand_bytes", operand_bytes, 1, 2);
  return gemm_rs::copy_chunks(m, n, k, world_size, operand_bytes);
}

template <class>
using Int = int;

// Defines a selection. kind: what is true of the problem, or null. ranks: the argument for their number, if any.
template <class... Arg>
void def_select(py::module_& m, const char* name, bool gemm::Problem::* kind, const char* doc,
                const Arg&... ranks) {
  const auto select = [kind](int m, int n, int k, bool transpose_weight, Int<Arg>... world_size, int num_sms,
                             int config, int operand_bytes, bool block_scales, bool fast, bool swiglu) {
    gemm::Problem problem = {
        .m = m, .n = n, .k = k, .transpose_weight = transpose_weight, .num_sms = num_sms, .swiglu = swiglu};
    ((problem.world_size = world_size), ...);
    if (kind != nullptr) problem.*kind = true;
    check_range("operand_bytes", operand_bytes, 1, 2);
    if (operand_bytes == 1) {
      if (transpose_weight) throw py::value_error("transpose_weight: expected False for fp8, got True");
      problem.operand_bytes = 1;
      problem.promotes = block_scales || !fast;
      problem.block_scales = block_scales;
    }
    return checked_select(problem, config);
  };
  m.def(name, select, "m"_a, "n"_a, "k"_a, "transpose_weight"_a, ranks..., "num_sms"_a, "config"_a = -1,
        "operand_bytes"_a = 2, "block_scales"_a = false, "fast"_a = false, "swiglu"_a = false, doc);
}

ag_gemm::Layout ag_gemm_layout(int m, int k, int world_size, int scale_columns) {
  check_shards(m, "k", k, world_size);
  check_range("scale_columns", scale_columns, 0, kMaxExtent / gemm::kScaleBlock);
  return ag_gemm::make_layout(m, k, world_size, scale_columns);
}

std::optional<std::tuple<int, int, int64_t, int>> piece_of_rows(const ag_gemm::Layout& self, int size,
                                                                int peers, int index) {
  check_extent("size", size);
  check_range("peers", peers, 1, runtime::kMaxWorldSize);
  check_range("index", index, 0, kMaxExtent);
  const int64_t per_block = (self.block_bytes(0) + size - 1) / size;
  check_range("pieces of a peer", self.row_blocks() * per_block, 1, kMaxExtent / peers);
  const ag_gemm::Pieces pieces = ag_gemm::make_pieces(self, size);
  if (index >= pieces.count(peers)) return std::nullopt;
  const ag_gemm::Piece piece = pieces.at(index);
  return std::tuple(piece.peer, piece.block, piece.offset, piece.bytes);
}

int64_t row_offset(const ag_gemm::Layout& self, int slot, int row) {
  check_index("slot", slot, self.world_size - 1);
  check_index("row", row, self.rows);
  return self.offset(slot, row);
}

int64_t scale_offset(const ag_gemm::Layout& self, int slot) {
  check_index("slot", slot, self.world_size - 1);
  return self.scale_offset(slot);
}

RankTiles ag_gemm_tiles(int m, int n, int world_size, int rank, int config, int cluster, int group_m) {
  const gemm_rs::Layout tiles = gemm_rs_layout(m, n, world_size, config);
  check_index("rank", rank, world_size);
  return all_tiles(ag_gemm::make_order(m, n, world_size, rank, config_at(config), checked_cluster(cluster),
                                       checked_group_m(group_m, tiles)));
}

// ---- exchanges --------------------------------------------------------------------------------------------

// m * n is limited like a number of columns, because a matrix may be treated as one row.
void check_matrix(int m, int n, int world_size) {
  check_world_size(world_size);
  check_extent("m", m);
  check_extent("n", n);
  check_extent("m * n", static_cast<int64_t>(m) * n);
}

template <Exchange (*kMake)(int m, int n, int world_size, Exchange::Mode mode)>
Exchange exchange(int m, int n, int world_size, Exchange::Mode mode) {
  check_matrix(m, n, world_size);
  check_multiple("n", n, "8", Exchange::kVector);
  check_range("mode", static_cast<int>(mode), 0, static_cast<int>(Exchange::Mode::kScatter));
  if (mode == Exchange::Mode::kScatter) check_shards(m, "n", n, world_size);
  return kMake(m, n, world_size, mode);
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
  check_index("source", source, self.world_size);
  check_index("owner", owner, self.world_size);
  check_index("row", row, self.m);
  // An owner at the edge may have no columns; its first column is then after the last column.
  check_range("column", column, 0, std::max<int64_t>(self.n - 1, self.first_column(owner)));
  return self.contribution(source, owner, row, column);
}

int64_t result(const Exchange& self, int row, int column) {
  check_index("row", row, self.m);
  check_index("column", column, self.n);
  return self.result(row, column);
}

int64_t int8_scatter_bytes(int rows, int n, int world_size) {
  check_matrix(rows, n, world_size);
  return runtime::Int8Scatter{rows, n, world_size}.bytes();
}

// ---- module -----------------------------------------------------------------------------------------------

void bind_atomics(py::module_& m) {
  m.def(
      "store_release",
      [](uint64_t address, uint32_t value) { runtime::store_release(checked_word("addr", address), value); },
      "addr"_a, "value"_a, "Store a u32, after everything written before. Addresses are trusted.");
  m.def(
      "load_acquire", [](uint64_t address) { return runtime::load_acquire(checked_word("addr", address)); },
      "addr"_a, "Load a u32; everything its writer released before it is visible from here on.");
  m.def(
      "wait_at_least", &wait_at_least, "addr"_a, "epoch"_a, "timeout_s"_a,
      "Wait without the GIL until the u32 has reached `epoch`, or for `timeout_s`; return it as last seen.");
  m.def("read_error", &read_error, "addr"_a,
        "(op, rank, peer, tile, expected, seen) of an ErrorRecord, or None if no wait has timed out.");
}

void bind_workspace(py::module_& m) {
  using runtime::SymmBuffer;
  m.attr("MAX_WORLD_SIZE") = runtime::kMaxWorldSize;
  py::dict ops;
  for (const char* name : runtime::kOpNames) ops[name] = py::int_(py::len(ops) + 1);
  m.attr("OP_IDS") = ops;
  m.attr("HEADER_BYTES") = runtime::kHeaderBytes;
  m.attr("MAX_PUSH_BLOCKS") = runtime::kMaxPushBlocks;
  py::class_<SymmBuffer>(m, "SymmBuffer", "A group's workspace, at `address` while it lives.")
      .def(py::init(&make_symm_buffer), "rank"_a, "world_size"_a, "peers"_a, "signal_bytes"_a, "slot_bytes"_a,
           "exchange_bytes"_a, "error"_a, "timeout_ns"_a)
      .def_property_readonly("address",
                             [](const SymmBuffer& self) { return reinterpret_cast<uint64_t>(&self); })
      .def_readonly("signal_bytes", &SymmBuffer::signal_bytes)
      .def_readonly("slot_bytes", &SymmBuffer::slot_bytes);
}

void bind_selection(py::module_& m) {
  py::class_<gemm::TileConfig>(m, "TileConfig", "A tile shape that kernels are compiled for.")
      .def_readonly("id", &gemm::TileConfig::id)
      .def_readonly("block_n", &gemm::TileConfig::block_n)
      .def_readonly("stages", &gemm::TileConfig::stages)
      .def_property_readonly("block_m", [](const gemm::TileConfig&) { return gemm::kBlockM; })
      .def_property_readonly("operand_bytes", &gemm::TileConfig::operand_bytes, "1: fp8, 2: bf16 and fp16.")
      .def_property_readonly("promotes", &gemm::TileConfig::promotes)
      .def_property_readonly("smem_bytes", &gemm::smem_bytes)
      .def_property_readonly("supports_transposed_weight", &gemm::supports_transposed_weight)
      .def_property_readonly("supports_split", &gemm::supports_split)
      .def_property_readonly("supports_keeping", &gemm::supports_keeping, "For the plain GEMM.")
      .def_property_readonly("supports_gathering", &gemm::supports_gathering)
      .def_property_readonly("supports_sending", &gemm::supports_sending)
      .def_property_readonly("name", &tile_name)
      .def("__repr__", [](const gemm::TileConfig& self) { return "<TileConfig " + tile_name(self) + ">"; });
  m.def(
      "tile_configs",
      [](int operand_bytes) {
        check_range("operand_bytes", operand_bytes, 1, 2);
        std::vector<gemm::TileConfig> tiles;
        for (const gemm::TileConfig& tile : gemm::kTileConfigs)
          if (tile.operand_bytes() == operand_bytes) tiles.push_back(tile);
        return tiles;
      },
      "operand_bytes"_a = 2, "The tile shapes for bf16 and fp16, whose ids are 0, 1, ..., or for fp8.");
  m.def("tile_config", &config_at, "id"_a);

  m.attr("MAX_EXTENT") = kMaxExtent;
  m.attr("QUANTIZE_SCRATCH_FLOATS") = gemm::kPartsFloats;
  m.attr("FIRST_SWAP_AB") = gemm::kFirstSwapAb;
  m.attr("NUM_SWAP_AB") = std::count_if(std::begin(gemm::kSwapAbConfigs), std::end(gemm::kSwapAbConfigs),
                                        [](const auto& tile) { return !tile.is_fp8; });
  m.attr("NUM_FP8_SWAP_AB") = gemm::kNumSwapAbConfigs - m.attr("NUM_SWAP_AB").cast<int>();
  m.def(
      "swap_ab_stage_blocks",
      [](int tile, int k) {
        check_extent("k", k);
        return gemm::swap_ab_stage_blocks(swap_ab_at(tile), k);
      },
      "tile"_a, "k"_a, "Into how many parts k can be split at most.");
  m.def("swap_ab_in_pairs", [](int tile) { return swap_ab_at(tile).in_pairs; }, "tile"_a);

  py::class_<gemm::Choice>(m, "Choice", "What the cost model chose, and what else it considered.")
      .def_readonly("config", &gemm::Choice::config)
      .def_property_readonly("name", &choice_name)
      .def_property_readonly(
          "cluster", [](const gemm::Choice& choice) { return static_cast<int>(choice.cluster); },
          "1: none, 2 and 3: pairs of CTAs share loads, 4 and 5: 2 and 3 CTAs share K.")
      .def_readonly("split", &gemm::Choice::split, "CTAs that share a swap-AB tile's K; 0: another tile.")
      .def_property_readonly("packed", &gemm::Choice::packed, "The choice as one integer, which ops take.")
      .def_readonly("group_m", &gemm::Choice::group_m)
      .def_readonly("time_us", &gemm::Choice::time_us)
      .def_readonly("reason", &gemm::Choice::reason)
      .def_readonly("candidates", &gemm::Choice::candidates);
  def_select(
      m, "select_gemm", nullptr,
      "config: -1, or a packed choice, whose parts may be 0. swiglu: half of the n columns are a gate.");
  def_select(m, "select_gemm_ar", &gemm::Problem::all_reduced, "GEMM+AllReduce; k is this rank's part.");
  def_select(m, "select_gemm_rs", nullptr,
             "GEMM+ReduceScatter; m counts the rows of all shards, k is this rank's part.", "world_size"_a);
  def_select(m, "select_ag_gemm", &gemm::Problem::gathers,
             "AllGather+GEMM; m counts the rows of all shards, n is this rank's part.", "world_size"_a);
}

void bind_gemm_rs(py::module_& m) {
  using gemm_rs::Layout;
  py::class_<Layout>(m, "RsLayout", "Where the tiles of GEMM+ReduceScatter lie in an owner's slots.")
      .def_readonly("m_tiles", &Layout::m_tiles, "Per shard.")
      .def_readonly("n_tiles", &Layout::n_tiles)
      .def_readonly("tile_bytes", &Layout::tile_bytes)
      .def_readonly("world_size", &Layout::world_size)
      .def_property_readonly("num_signals", &Layout::num_signals, "u32 words per rank.")
      .def_property_readonly("slot_bytes", &Layout::slot_bytes, "Of one of the two buffers of a rank.")
      .def_static("slot_index", &checked_slot_index, "src"_a, "owner"_a)
      .def("tile_offset", &tile_offset, "slot"_a, "m_tile"_a, "n_tile"_a)
      .def("signal_index", &signal_index, "m_tile"_a, "n_tile"_a, "half"_a, "Word in the region of a slot.");
  m.def("gemm_rs_layout", &gemm_rs_layout, "m"_a, "n"_a, "world_size"_a, "config"_a);
  m.def("gemm_rs_tiles", &gemm_rs_tiles, "m"_a, "n"_a, "world_size"_a, "rank"_a, "config"_a, "cluster"_a,
        "group_m"_a, "copied"_a = false, "idle"_a = false,
        "[(owner, m_tile, n_tile)] in the order of `rank`. idle: also None for each CTA without a tile.");
  m.def("gemm_rs_chunks", &gemm_rs_chunks, "count"_a, "tiles"_a,
        "[(first, size)] of the chunks in which copy engines send a slot, [chunk] of its tiles.");
  m.def("gemm_rs_copy_chunks", &copy_chunks, "m"_a, "n"_a, "k"_a, "world_size"_a, "operand_bytes"_a = 2);
}

void bind_ag_gemm(py::module_& m) {
  using ag_gemm::Layout;
  py::class_<Layout>(m, "AgLayout", "Where the rows of peers lie in a rank's slots.")
      .def_readonly("rows", &Layout::rows, "Of one shard.")
      .def_readonly("row_bytes", &Layout::row_bytes)
      .def_readonly("scale_columns", &Layout::scale_columns, "Scales of each row.")
      .def("scale_offset", &scale_offset, "slot"_a, "Of the scales of a slot: [scale_columns][rows], padded.")
      .def_property_readonly("row_blocks", &Layout::row_blocks, "Of a shard; each has a signal.")
      .def_property_readonly("num_signals", &Layout::num_signals, "u32 words per rank.")
      .def_property_readonly("slot_bytes", &Layout::slot_bytes, "Of one of the two buffers of a rank.")
      .def_static("slot_index", &checked_slot_index, "src"_a, "owner"_a)
      .def("offset", &row_offset, "slot"_a, "row"_a)
      .def("piece", &piece_of_rows, "size"_a, "peers"_a, "index"_a,
           "(peer, block, offset, bytes) of what a CTA copies at a time, or None beyond the last piece.");
  m.def("ag_gemm_layout", &ag_gemm_layout, "m"_a, "k"_a, "world_size"_a, "scale_columns"_a = 0,
        "scale_columns: fp32 scales of each row of fp8; 0: rows of 2-byte elements.");
  m.def("ag_gemm_tiles", &ag_gemm_tiles, "m"_a, "n"_a, "world_size"_a, "rank"_a, "config"_a, "cluster"_a,
        "group_m"_a, "[(source, m_tile, n_tile)] in the order of `rank`; m counts all rows.");
}

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
      .def_property_readonly("bytes", &Exchange::bytes, "Of a rank's exchange area.")
      .def("first_row", &of_rank<Exchange, &Exchange::first_row>, "rank"_a)
      .def("first_column", &of_rank<Exchange, &Exchange::first_column>, "rank"_a)
      .def("columns_of", &of_rank<Exchange, &Exchange::columns_of>, "rank"_a, "Columns that a rank sums.")
      .def("contribution", &contribution, "source"_a, "owner"_a, "row"_a, "column"_a, "Offset in bytes.")
      .def("result", &result, "row"_a, "column"_a, "Of the sum, in every rank's area.");
  m.def("exchange", &exchange<runtime::make_exchange>, "m"_a, "n"_a, "world_size"_a, "mode"_a);
  m.def("row_exchange", &exchange<runtime::make_row_exchange>, "m"_a, "n"_a, "world_size"_a, "mode"_a,
        "The same matrix as one row, of which two-shot owners get whole rows.");
  m.def("int8_scatter_bytes", &int8_scatter_bytes, "rows"_a, "n"_a, "world_size"_a,
        "Of the area of a rank that sums `rows` rows whose contributions travel as int8.");
  m.def("all_reduce_mode", &all_reduce_mode, "m"_a, "n"_a, "world_size"_a, "The faster.");
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Plans, tile orders and shared-memory atomics of flux: no torch, no CUDA.";
  int fact = 0;
  for (const char* name : {"VERSION", "WHY_NO_KERNELS", "CUDA_VERSION", "COMMIT"})
    m.attr(name) = kBuildFacts[fact++];
  bind_atomics(m);
  bind_known_calls(m);
  bind_workspace(m);
  bind_selection(m);
  bind_gemm_rs(m);
  bind_ag_gemm(m);
  bind_exchange(m);
  bind_moe(m);
#ifdef FLUX_SANITIZE
  bind_planted(m);
#endif
}

}  // namespace flux::bindings
