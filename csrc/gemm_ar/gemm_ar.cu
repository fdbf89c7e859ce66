
#include "gemm/sm90/launch_swap_ab.cuh"
#include "gemm_ar/all_reduce.cuh"

FLUX_KERNELS(flux::gemm::SwapAbFamily<flux::gemm::ExchangeOutput, false>)

namespace flux::gemm_ar {
namespace {

runtime::Exchange checked_exchange(int64_t m, int64_t n, const runtime::SymmBuffer& symm,
                                   runtime::Exchange::Mode mode) {
  FLUX_CHECK(symm.world_size >= 2, symm.world_size);
  FLUX_CHECK(n % runtime::Exchange::kVector == 0 && m * n <= INT32_MAX, m, n);
  const auto exchange =
      runtime::make_exchange(static_cast<int>(m), static_cast<int>(n), symm.world_size, mode);
  FLUX_CHECK(exchange.bytes() <= symm.exchange_bytes, exchange.bytes(), symm.exchange_bytes);
  return exchange;
}

gemm::Finish finish_of(const void* bias, const Extras& extras, const runtime::Matrix& out, int num_sms) {
  const gemm::Quantized& q = extras.quantized;
  FLUX_CHECK(q.q == nullptr || extras.norm_weight != nullptr, out.rows);
  FLUX_CHECK(q.granularity != gemm::Granularity::kBlock && !q.e5m2, static_cast<int>(q.granularity), q.e5m2);
  FLUX_CHECK(!q.needs_all() || num_sms <= gemm::kMaxParts, num_sms);
  return {bias, extras.residual, extras.norm_weight, extras.eps, const_cast<void*>(out.data), extras.sum_out,
          q};
}

runtime::Kernels kernels([] {
  runtime::load(sum_over_ranks<__nv_bfloat16>, sum_over_ranks<__half>);
  for (const auto kernel : {sum_and_norm<__nv_bfloat16>, sum_and_norm<__half>})
    FLUX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kNormMemory));
});

void launch_sum(const gemm::ExchangeParams& exchange, const void* matrix, runtime::DType dtype, int num_sms,
                cudaStream_t stream) {
  kernels.load();
  SumParams params = {exchange, matrix, exchange.exchange.n};
  runtime::Exchange& x = params.exchange.exchange;
  const bool is_bfloat16 = runtime::is_bfloat16(dtype), norms = exchange.finish.norm_weight;
  const int64_t vectors = static_cast<int64_t>(x.m) * x.n / runtime::Exchange::kVector;
  if (norms) {
    x = runtime::make_row_exchange(x.m, x.n, x.world_size, x.mode);
    FLUX_CHECK(x.bytes() <= exchange.symm.exchange_bytes, x.bytes(), exchange.symm.exchange_bytes);
  } else if (x.mode != runtime::Exchange::Mode::kScatter) {
    x = runtime::make_exchange(1, x.m * x.n, x.world_size, x.mode);
  }
  const bool many = vectors > static_cast<int64_t>(num_sms) * kFewThreads;
  const int threads = norms ? kNormThreads : many ? kManyThreads : kFewThreads;
  const int ctas = static_cast<int>(std::min<int64_t>(num_sms, (vectors + threads - 1) / threads));
  const auto kernel = norms ? (is_bfloat16 ? sum_and_norm<__nv_bfloat16> : sum_and_norm<__half>)
                            : (is_bfloat16 ? sum_over_ranks<__nv_bfloat16> : sum_over_ranks<__half>);
  runtime::Launch(ctas, threads + kClosingThreads, norms ? kNormMemory : 0, stream)
      .early_start(runtime::may_start_early(num_sms))
      .run(kernel, params);
}

// A scale of the whole tensor depends on rows of all CTAs, so it takes a launch of its own.
void quantize_rest(const runtime::Matrix& norm, runtime::DType dtype, const gemm::Quantized& to, int num_sms,
                   cudaStream_t stream) {
  if (to.needs_all()) gemm::quantize_with_parts(norm, dtype, to, num_sms, stream);
}

}  // namespace

void gemm_ar(const gemm::GemmArgs& args, const Extras& extras, const runtime::SymmBuffer& symm,
             runtime::Exchange::Mode mode, cudaStream_t stream) {
  const int num_sms = runtime::usable_sms(args.num_sms);
  FLUX_CHECK(mode != runtime::Exchange::Mode::kScatter, args.m());
  const runtime::Exchange exchange = checked_exchange(args.m(), args.n(), symm, mode);
  FLUX_CHECK(args.out.row_stride == args.n(), args.out.row_stride, args.n());
  gemm::Problem problem = gemm::problem_of(args, num_sms);
  problem.all_reduced = true;
  const gemm::Choice choice = gemm::select(problem, args.config);
  FLUX_CHECK(choice.swaps_ab(), "no kernel that sums", args.m(), choice.config);
  gemm::ExchangeParams params = {symm, exchange, finish_of(args.bias, extras, args.out, num_sms),
                                 runtime::kGemmAr};
  // Tiles in one column send at the same time. Sums follow if rows are divisible and no CTA has two tiles.
  const int at_once = gemm::ceil_div(args.m(), gemm::kSwapAbConfigs[choice.config - gemm::kFirstSwapAb].rows);
  const int tiles = at_once * gemm::ceil_div(args.n(), gemm::kSwapAbN);
  if (args.m() % at_once == 0 && tiles <= num_sms) params.rows_at_once = at_once;
  gemm::launch_swap_ab<gemm::ExchangeOutput, false>(args, choice, num_sms, params, stream);
  quantize_rest(args.out, args.dtype, extras.quantized, num_sms, stream);
}

void all_reduce(const runtime::Matrix& x, const runtime::Matrix& out, runtime::DType dtype,
                const Extras& extras, const runtime::SymmBuffer& symm, int num_sms,
                runtime::Exchange::Mode mode, cudaStream_t stream) {
  num_sms = runtime::usable_sms(num_sms);
  FLUX_CHECK(x.row_stride == x.columns && out.row_stride == out.columns, x.row_stride, out.row_stride);
  const runtime::Exchange exchange = checked_exchange(x.rows, x.columns, symm, mode);
  const bool scatters = mode == runtime::Exchange::Mode::kScatter;
  FLUX_CHECK(!scatters || x.rows % symm.world_size == 0, x.rows, symm.world_size);
  FLUX_CHECK(out.rows == exchange.slot_rows() && out.columns == x.columns, out.rows, out.columns);
  FLUX_CHECK(!scatters || (extras.residual == nullptr && extras.norm_weight == nullptr), x.rows);
  const gemm::Finish finish = finish_of(/*bias=*/nullptr, extras, out, num_sms);
  launch_sum({symm, exchange, finish, scatters ? runtime::kReduceScatter : runtime::kAllReduce}, x.data,
             dtype, num_sms, stream);
  quantize_rest(out, dtype, extras.quantized, num_sms, stream);
}

}  // namespace flux::gemm_ar
