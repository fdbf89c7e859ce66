// A CUDA device without a GPU, to time what the host does for a call (benchmarks/host_cost.py). Tensors on it lie in
// host memory, and a launch does nothing. The kernels' host code is linked against the runtime functions here.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

// ---- torch -------------------------------------------------------------------------------------------------------

namespace at {

// torch looks for hooks of this name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Keeps freed blocks by size under a lock, as torch's caching allocator does.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    int kind = kSmallest;
    while ((size_t{1} << kind) < bytes) ++kind;
    void* block = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (counts_[kind] > 0) block = free_[kind][--counts_[kind]];
    }
    if (block == nullptr) block = std::aligned_alloc(size_t{1} << kSmallest, size_t{1} << kind);
    // The kind fits into the low bits of an aligned address.
    return {block, static_cast<char*>(block) + kind, &release, {c10::DeviceType::CUDA, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static constexpr int kSmallest = 9, kKinds = 48, kFree = 64;

  static void release(void* context);

  std::mutex mutex_;
  void* free_[kKinds][kFree];
  int counts_[kKinds] = {};
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &allocator)

void Allocator::release(void* context) {
  const auto address = reinterpret_cast<uintptr_t>(context);
  const int kind = static_cast<int>(address & ((1 << kSmallest) - 1));
  void* const block = reinterpret_cast<void*>(address - kind);
  const std::lock_guard lock(allocator.mutex_);
  if (allocator.counts_[kind] < kFree) {
    allocator.free_[kind][allocator.counts_[kind]++] = block;
  } else {
    std::free(block);
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::kFloat),
                                   format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(at::kFloat));
}

constexpr long kStream = 8;
// Calls of functions of CUDA, and those of them that put something on a stream, which takes a driver microseconds.
long cuda_calls = 0, enqueued = 0;
int called() { return ++cuda_calls, 0; }
int enqueues() { return ++enqueued, called(); }
at::Tensor& copy(at::Tensor& to, const at::Tensor&, bool) { return enqueues(), to; }
at::Tensor& add(at::Tensor& to, const at::Tensor&, const at::Scalar&) { return enqueues(), to; }
std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& x, at::IntArrayRef,
                                            const std::optional<at::Tensor>&, std::optional<double>) {
  return enqueues(), std::make_tuple(at::empty_like(x), x);
}
PyObject* calls(PyObject*, PyObject*) { return PyLong_FromLong(cuda_calls); }
PyObject* on_streams(PyObject*, PyObject*) { return PyLong_FromLong(enqueued); }
PyObject* zero(PyObject*, PyObject*) { return PyLong_FromLong(0); }
PyObject* stream(PyObject*, PyObject*) { return PyLong_FromLong(kStream); }
PyObject* no(PyObject*, PyObject*) { Py_RETURN_FALSE; }
PyMethodDef methods[] = {{"calls", calls, METH_NOARGS, "How many functions of CUDA were called so far."},
                         {"enqueued", on_streams, METH_NOARGS, "Those that put something on a stream."},
                         {"_cuda_getDevice", zero, METH_NOARGS, ""},
                         {"_cuda_getCurrentRawStream", stream, METH_O, ""},
                         {"_cuda_isCurrentStreamCapturing", no, METH_NOARGS, ""},
                         {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fake_cuda", "", -1, methods};

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("add_.Tensor", add);
  m.impl("_fused_rms_norm", rms_norm);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(at::native::view)));
}

PyMODINIT_FUNC PyInit_fake_cuda() { return PyModule_Create(&module); }

// ---- CUDA --------------------------------------------------------------------------------------------------------

#define RUNTIME extern "C" __attribute__((visibility("default")))

RUNTIME int aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = reinterpret_cast<void*>(kStream);
  return 0;
}

namespace {

int encode_tiled(void* map) { return std::memset(map, 1, 128), called(); }
int replace_address(void* map, void* address) {
  return std::memcpy(map, &address, sizeof(address)), called();
}

}  // namespace

RUNTIME void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
RUNTIME void __cudaRegisterFatBinaryEnd(void**) {}
RUNTIME void __cudaUnregisterFatBinary(void**) {}
RUNTIME void __cudaRegisterFunction() {}
RUNTIME char __cudaInitModule(void**) { return 1; }
RUNTIME int __cudaGetKernel(const void** kernel, const void* function) { return *kernel = function, 0; }
RUNTIME int __cudaLaunchKernel() { return 0; }
RUNTIME int __cudaPopCallConfiguration() { return 0; }
RUNTIME int cudaDeviceGetAttribute(int* value, int, int) { return *value = 132, 0; }
RUNTIME int cudaEventCreateWithFlags(void**, unsigned) { return 0; }
RUNTIME int cudaEventRecord(void*, void*) { return enqueues(); }
RUNTIME int cudaFuncGetAttributes(void*, const void*) { return 0; }
RUNTIME int cudaFuncSetAttribute(const void*, int, int) { return 0; }
RUNTIME int cudaGetDevice(int* device) { return *device = 0, called(); }
RUNTIME int cudaSetDevice(int) { return called(); }
RUNTIME const char* cudaGetErrorString(int) { return ""; }
RUNTIME int cudaGetLastError() { return 0; }
RUNTIME int cudaLaunchKernelExC(const void*, const void*, void**) { return enqueues(); }
RUNTIME int cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, int, void*) {
  return enqueues();
}
RUNTIME int cudaMemcpyAsync(void*, const void*, size_t, int, void*) { return enqueues(); }
RUNTIME int cudaOccupancyMaxActiveClusters(int* count, const void*, const void*) { return *count = 16, 0; }
RUNTIME int cudaStreamCreateWithFlags(void**, unsigned) { return 0; }
RUNTIME int cudaStreamIsCapturing(void*, int* status) { return *status = 0, called(); }
RUNTIME int cudaStreamWaitEvent(void*, void*, unsigned) { return enqueues(); }
RUNTIME int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             int* found) {
  const bool encodes = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  const bool replaces = std::strcmp(name, "cuTensorMapReplaceAddress") == 0;
  *function = encodes    ? reinterpret_cast<void*>(&encode_tiled)
              : replaces ? reinterpret_cast<void*>(&replace_address)
                         : reinterpret_cast<void*>(&enqueues);  // cuStreamBatchMemOp
  return *found = 0, 0;
}
