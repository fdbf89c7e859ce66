// The CUDA runtime and driver of the simulated machine: devices, streams, events, launches, tensor maps. Calls only
// enqueue; cudaDeviceSynchronize runs everything on all devices.
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "cuda_runtime_api.h"
#include "machine.h"
#include "tensor_map.h"

struct SimEvent {
  uint64_t issued = 0, reached = 0;
  sim::Known known;
};

namespace sim {
namespace {

// As of a thread of autograd, which the driver refuses before the thread has chosen a device.
thread_local bool has_context = false;

struct StreamOp {
  enum class Kind { kLaunch, kCopy, kRecord, kWaitEvent, kWrite, kWaitValue };
  Kind kind;
  std::unique_ptr<Launch> launch = nullptr;
  void* dst = nullptr;
  const void* src = nullptr;
  size_t bytes = 0;
  SimEvent* event = nullptr;
  uint64_t ticket = 0;
  uint32_t value = 0;
  bool issued = false, done = false;
  bool ends_graph = false;
};

}  // namespace
}  // namespace sim

struct CUstream_st {
  int device = 0;
  std::deque<sim::StreamOp> ops;
  sim::Past past;       // the stream is an actor, with its copies and writes
  sim::Known at_start;  // of its last launch
};

namespace sim {
namespace {

int current_device = 0;
std::vector<std::unique_ptr<CUstream_st>>
    streams;  // of the process: the first of each device is its default one
std::vector<std::unique_ptr<SimEvent>> events;
constexpr int kMaxDevices = 8;
constexpr int kSharedLimit = 232448;
std::unordered_map<const void*, int> shared_limits;
Graph* captured = nullptr;  // where launches go while a graph is captured

CUstream_st& stream_of(cudaStream_t stream) {
  while (streams.size() < kMaxDevices) {
    streams.push_back(std::make_unique<CUstream_st>());
    streams.back()->device = static_cast<int>(streams.size()) - 1;
  }
  return stream != nullptr ? *stream : *streams[current_device];
}

std::string kernel_name(const void* kernel) {
  Dl_info info = {};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "kernel";
  int status = 0;
  char* const full = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? full : info.dli_sname;
  std::free(full);
  if (name.starts_with("void ")) name.erase(0, 5);
  const size_t end = name.rfind('(');
  if (end != std::string::npos && name.find('<') < end) name.erase(end);
  for (const char* part : {"flux::gemm::", "flux::", "cute::SM90::GMMA::"}) {
    for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, std::strlen(part));
  }
  return name;
}

// Starts clusters of a launch on free SMs.
bool fill(CUstream_st& stream, Launch& launch) {
  bool any = false;
  const int size = launch.config.cluster;
  // All CTAs of a cooperative launch start together.
  if (launch.config.cooperative && launch.next_cta == 0 && launch.device->free_slots < launch.total())
    return false;
  if (launch.next_cta == 0) {
    // A kernel that may start early knows no more than the one before it, even if it starts late.
    if (!launch.may_start_early()) stream.at_start = all_fenced(stream.past.known);
    launch.at_start = stream.at_start;
  }
  while (launch.next_cta < launch.total() && launch.device->free_slots >= size) {
    launch.device->free_slots -= size;
    const auto cluster = std::make_shared<Cluster>();
    const int first = launch.order[launch.next_cta / size] * size;
    for (int i = 0; i < size; ++i) start_cta(&launch, first + i, cluster, i);
    launch.next_cta += size;
    any = true;
  }
  return any;
}

bool advance(CUstream_st& stream) {
  bool any = false;
  while (!stream.ops.empty()) {
    if (machine.devices.at(stream.device).held) return any;
    StreamOp& op = stream.ops.front();
    switch (op.kind) {
      case StreamOp::Kind::kLaunch: {
        Launch& launch = *op.launch;
        if (launch.device->frozen) return any;
        if (!launch.earlier_complete) {
          launch.earlier_complete = any = true;
          launch.earlier_known = all_fenced(stream.past.known);
          launch.earlier_done.wake_all();
        }
        any |= fill(stream, launch);
        op.done = launch.complete();
        if (op.done) {
          Known& known = stream.past.known;
          known = with_launch(join(known, launch.at_exit), launch.number);
        }
        if (!op.done && launch.triggered == launch.total() && stream.ops.size() > 1) {
          StreamOp& next = stream.ops[1];
          if (next.kind == StreamOp::Kind::kLaunch && next.launch->may_start_early())
            any |= fill(stream, *next.launch);
        }
        break;
      }
      case StreamOp::Kind::kCopy:
      case StreamOp::Kind::kWrite:
        if (!op.issued) {
          op.issued = any = true;
          issue(false, [&op, &past = stream.past] {
            if (op.kind == StreamOp::Kind::kCopy) {
              const Access access = {"copy", Epoch::of(past.actor, 0, past.now), 0, past};
              copy_global(op.dst, op.src, static_cast<int64_t>(op.bytes), access);
              std::memcpy(op.dst, op.src, op.bytes);
            } else {
              const Epoch epoch = Epoch::of(past.actor, 0, past.now, /*strong=*/true);
              write_global(op.dst, sizeof(op.value), {"stream's write", epoch, 0, past});
              *static_cast<uint32_t*>(op.dst) = op.value;
              told_at(op.dst) = {with(past.known, {past.stamp()}), -1};
            }
            past.known = with(past.known, {past.stamp()});
            ++past.now;
            op.done = true;
          });
        }
        break;
      case StreamOp::Kind::kRecord:
        op.event->reached = std::max(op.event->reached, op.ticket);
        op.event->known = stream.past.known;
        op.done = true;
        break;
      case StreamOp::Kind::kWaitEvent:
        op.done = op.event->reached >= op.ticket;
        if (op.done) stream.past.known = join(stream.past.known, op.event->known);
        break;
      case StreamOp::Kind::kWaitValue:
        op.done = static_cast<int32_t>(*static_cast<const uint32_t*>(op.src) - op.value) >= 0;
        if (op.done) stream.past.known = join(stream.past.known, told_at(op.src).known);
        break;
    }
    if (!op.done) break;
    stream.ops.pop_front();
    any = true;
  }
  return any;
}

}  // namespace

bool advance_streams() {
  if (machine.config.occupied > 0 && streams_empty(machine.config.occupied_until)) {
    for (Device& device : machine.devices) {
      if (device.index != machine.config.occupied_until) device.free_slots += machine.config.occupied;
    }
    machine.config.occupied = 0;
  }
  const bool may_wait = machine.config.policy.when != Policy::When::kEarliest;
  bool any = false, waits = false;
  for (const auto& stream : streams) {
    // A stream may stand still for any time while others go on.
    if (may_wait && !stream->ops.empty() && machine.draw(2) == 0) {
      waits = true;
    } else {
      any |= advance(*stream);
    }
  }
  if (any || !waits) return any;
  for (const auto& stream : streams) any |= advance(*stream);
  return any;
}

bool streams_empty(int device) {
  for (const auto& stream : streams) {
    if ((device < 0 || stream->device == device) && !stream->ops.empty()) return false;
  }
  return true;
}

void reset_streams() {
  for (const auto& stream : streams) stream->ops.clear();
  current_device = 0;
  forget_clocks();
}

std::string blocked_streams() {
  std::string found;
  for (const auto& stream : streams) {
    if (stream->ops.empty()) continue;
    const StreamOp& op = stream->ops.front();
    found += text("  a stream of rank ", stream->device);
    if (op.kind == StreamOp::Kind::kLaunch) {
      found += text(" runs ", op.launch->name, ": ", op.launch->done_ctas, " of ", op.launch->total(),
                    " CTAs have ended, ", op.launch->next_cta, " have started\n");
    } else if (op.kind == StreamOp::Kind::kWaitValue) {
      const uint32_t word = *static_cast<const uint32_t*>(op.src);
      found += text(" waits for ", op.value, ", the word is ", word, "\n");
    } else {
      found += " waits for an event or a copy\n";
    }
  }
  return found;
}

// Behind what the stream has; `follows_launch`: programmatic dependent launch may apply.
static void enqueue(CUstream_st& stream, const GraphNode& node, bool follows_launch) {
  StreamOp op = {StreamOp::Kind::kLaunch};
  op.launch = std::make_unique<Launch>();
  Launch& launch = *op.launch;
  launch.name = node.name;
  launch.config = node.config;
  launch.body = node.body;
  launch.device = &machine.devices.at(stream.device);
  launch.number = new_launch();
  launch.follows_launch = follows_launch;
  for (int i = 0; i < launch.total() / launch.config.cluster; ++i) launch.order.push_back(i);
  const auto is_named = [&](const std::string& name) { return launch.name.find(name) != std::string::npos; };
  const bool ordered = std::ranges::any_of(machine.config.ordered, is_named);
  const Policy::Order order = ordered ? Policy::Order::kFifo : machine.config.policy.order;
  if (order == Policy::Order::kLifo) std::reverse(launch.order.begin(), launch.order.end());
  if (order == Policy::Order::kRandom) std::shuffle(launch.order.begin(), launch.order.end(), machine.random);
  stream.ops.push_back(std::move(op));
}

bool launch(const void* kernel, const LaunchConfig& config, std::function<void()> body) {
  if (config.cooperative && static_cast<int>(config.grid.x) > machine.config.resident) return false;
  const int limit = std::max(49152, shared_limits.contains(kernel) ? shared_limits[kernel] : 0);
  if (static_cast<int>(config.shared_bytes) > limit)
    report("launch with more shared memory than the kernel's limit");
  if (static_cast<int>(config.grid.x) % config.cluster != 0) report("the grid is no multiple of the cluster");
  const GraphNode node = {kernel_name(kernel), config, std::move(body)};
  if (captured != nullptr) {
    captured->push_back(node);
    return true;
  }
  CUstream_st& stream = stream_of(static_cast<cudaStream_t>(config.stream));
  const bool follows_launch = !stream.ops.empty() && stream.ops.back().kind == StreamOp::Kind::kLaunch &&
                              !stream.ops.back().ends_graph;
  enqueue(stream, node, follows_launch);
  return true;
}

Graph capture(const std::function<void()>& calls) {
  Graph graph;
  captured = &graph;
  calls();
  captured = nullptr;
  return graph;
}

void replay(const Graph& graph) {
  CUstream_st& stream = stream_of(nullptr);
  for (size_t i = 0; i < graph.size(); ++i) enqueue(stream, graph[i], /*follows_launch=*/i > 0);
  if (!graph.empty()) stream.ops.back().ends_graph = true;
}

void wait_for_earlier_kernels(const Where& where) {
  Launch& launch = *here().launch;
  while (!launch.earlier_complete) {
    wait_on(launch.earlier_done, where, [] { return std::string("earlier kernels of its stream"); });
  }
  Clock& clock = self().clock;
  learn(clock, launch.earlier_known);
  clock.at_fence = join(clock.at_fence, launch.earlier_known);
}

void let_next_kernel_start() {
  Cta& cta = here();
  if (!cta.triggered) {
    cta.triggered = true;
    ++cta.launch->triggered;
  }
  maybe_preempt();
}

}  // namespace sim

using sim::StreamOp;

cudaError_t cudaGetDevice(int* device) {
  *device = sim::current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  sim::current_device = device;
  sim::has_context = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = sim::machine.config.num_sms;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  // What was before is known to all, and what follows knows all of this.
  for (const auto& stream : sim::streams) {
    stream->past = {};
    stream->past.actor =
        sim::new_actor(-1, sim::text("a stream of rank ", stream->device), stream->device, 1);
  }
  sim::run_all();
  sim::forget_clocks();
  sim::forget_all_told();
  for (const auto& event : sim::events) event->known = {};
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, uint64_t,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (std::strcmp(name, "cuTensorMapEncodeTiled") == 0)
    *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  if (std::strcmp(name, "cuTensorMapReplaceAddress") == 0)
    *function = reinterpret_cast<void*>(&cuTensorMapReplaceAddress);
  if (std::strcmp(name, "cuStreamBatchMemOp") == 0) *function = reinterpret_cast<void*>(&cuStreamBatchMemOp);
  *found = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  sim::stream_of(nullptr);
  sim::streams.push_back(std::make_unique<CUstream_st>());
  sim::streams.back()->device = sim::current_device;
  *stream = sim::streams.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  sim::events.push_back(std::make_unique<SimEvent>());
  *event = sim::events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  sim::stream_of(stream).ops.push_back(
      {.kind = StreamOp::Kind::kRecord, .event = event, .ticket = ++event->issued});
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  sim::stream_of(stream).ops.push_back(
      {.kind = StreamOp::Kind::kWaitEvent, .event = event, .ticket = event->issued});
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > dst_pitch || width > src_pitch) return cudaErrorInvalidValue;
  for (size_t row = 0; row < height; ++row) {
    cudaMemcpyAsync(static_cast<char*>(dst) + row * dst_pitch,
                    static_cast<const char*>(src) + row * src_pitch, width, kind, stream);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  for (const void* each : {static_cast<const void*>(dst), src})
    sim::check_global(each, static_cast<int64_t>(bytes), "cudaMemcpyAsync", sim::kNowhere);
  sim::stream_of(stream).ops.push_back(
      {.kind = StreamOp::Kind::kCopy, .dst = dst, .src = src, .bytes = bytes});
  return cudaSuccess;
}
CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* ops, unsigned) {
  for (unsigned i = 0; i < count; ++i) {
    const bool waits = ops[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
    const auto kind = waits ? StreamOp::Kind::kWaitValue : StreamOp::Kind::kWrite;
    const CUstreamMemOp& word = waits ? ops[i].waitValue : ops[i].writeValue;
    void* const at = reinterpret_cast<void*>(word.address);
    sim::check_global(at, 4, "stream memory operation", sim::kNowhere);
    sim::stream_of(stream).ops.push_back({.kind = kind, .dst = at, .src = at, .value = word.value});
  }
  return CUDA_SUCCESS;
}

cudaError_t sim_set_shared_limit(const void* kernel, int bytes) {
  if (bytes > sim::kSharedLimit) return cudaErrorInvalidValue;
  sim::shared_limits[kernel] = bytes;
  return cudaSuccess;
}

sim::LaunchConfig sim_config(const cudaLaunchConfig_t& config) {
  sim::LaunchConfig result;
  result.grid = {config.gridDim.x, config.gridDim.y, config.gridDim.z};
  result.block = {config.blockDim.x, config.blockDim.y, config.blockDim.z};
  result.shared_bytes = config.dynamicSmemBytes;
  result.stream = config.stream;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    switch (attribute.id) {
      case cudaLaunchAttributeClusterDimension:
        result.cluster = static_cast<int>(attribute.val.clusterDim.x);
        break;
      case cudaLaunchAttributeProgrammaticStreamSerialization:
        result.early_start = attribute.val.programmaticStreamSerializationAllowed != 0;
        break;
      case cudaLaunchAttributeCooperative:
        result.cooperative = attribute.val.cooperative != 0;
        break;
    }
  }
  return result;
}

cudaError_t sim_max_active_clusters(int* count, const cudaLaunchConfig_t& config) {
  const int size = sim_config(config).cluster, all = sim::machine.config.num_sms / size;
  // GPUs differ in how many SMs their groups have: on every other one, only half of the clusters fit.
  *count = size > 1 && sim::current_device % 2 == 1 ? (all + 1) / 2 : all;
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!sim::has_context) return CUDA_ERROR_INVALID_CONTEXT;
  sim::TensorMap result = {};
  result.magic = sim::TensorMap::kMagic;
  result.base = static_cast<uint8_t*>(address);
  result.rank = static_cast<uint8_t>(rank);
  result.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                         : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                   : 2;
  result.swizzle_bits = static_cast<uint8_t>(swizzle);  // 32, 64, 128 bytes: 1, 2, 3
  bool good = rank >= 1 && rank <= 3 && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (cuuint32_t i = 0; i < 3; ++i) {
    const bool there = i < rank;
    result.sizes[i] = there ? static_cast<int64_t>(sizes[i]) : 1;
    result.box[i] = there ? box[i] : 1;
    good &= !there || (sizes[i] > 0 && box[i] > 0 && box[i] <= 256 && element_strides[i] == 1);
    if (i > 0 && there) {
      result.strides[i - 1] = static_cast<int64_t>(strides[i - 1]);
      good &= strides[i - 1] % 16 == 0;
    }
  }
  const uint32_t row_bytes = result.box[0] * result.element_bytes;
  good &= row_bytes % 16 == 0 && (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row_bytes <= 16u << swizzle);
  static_assert(sizeof(result) <= sizeof(*map));
  std::memcpy(map, &result, sizeof(result));
  return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
  sim::TensorMap kept;
  std::memcpy(&kept, map, sizeof(kept));
  if (kept.magic != sim::TensorMap::kMagic || reinterpret_cast<uintptr_t>(address) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  kept.base = static_cast<uint8_t*>(address);
  std::memcpy(map, &kept, sizeof(kept));
  return CUDA_SUCCESS;
}
