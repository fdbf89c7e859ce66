#include "case.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace cases {

Sums multiply(const Values& x, const Values& weight, bool transposed) {
  const int n = transposed ? weight.columns : weight.rows;
  Sums product(x.rows * n);
  Sums by_k;  // [k][n]
  for (int k = 0; k < x.columns; ++k) {
    for (int column = 0; column < n; ++column) {
      by_k.push_back(transposed ? weight.at(k, column) : weight.at(column, k));
    }
  }
  for (int row = 0; row < x.rows; ++row) {
    int* const sums = &product[row * n];
    for (int k = 0; k < x.columns; ++k) {
      const int factor = x.at(row, k);
      const int* const others = &by_k[k * n];
      for (int column = 0; column < n; ++column) sums[column] += factor * others[column];
    }
  }
  return product;
}

static bool verbose = false;

void describe_case(const std::string& what) {
  sim::machine.case_name += ": " + what;
  if (verbose) std::fprintf(stderr, "%s\n", sim::machine.case_name.c_str());
}

static int run_cases(int argc, char** argv) {
  uint64_t seed = 1;
  int count = 1;
  double seconds = 1e9;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seed") seed = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == "--cases") count = std::atoi(argv[i + 1]);
    if (option == "--seconds") seconds = std::atof(argv[i + 1]);
    if (option == "--only") only = argv[i + 1];
    if (option == "--policy") sim::machine.fixed_policy = std::atoll(argv[i + 1]);
    if (option == "--verbose") verbose = std::atoi(argv[i + 1]) != 0;
  }
  const auto start = std::chrono::steady_clock::now();
  int run = 0;
  for (int i = 0; i < count; ++i, ++seed) {
    for (const NamedCase& each : kCases) {
      if (!only.empty() && only != each.name) continue;
      if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) break;
      sim::machine.case_name = std::string("--only ") + each.name + " --seed " + std::to_string(seed);
      each.run(seed);
      ++run;
    }
  }
  if (run == 0) {
    std::fprintf(stderr, "no such case\n");
    return 2;
  }
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%d cases exact in %.1f s\n", run, took);
  std::fflush(stdout);
  _exit(0);  // the thread-local block is mapped over: nothing that runs at exit may use it
}

}  // namespace cases

int main(int argc, char** argv) { return cases::run_cases(argc, argv); }
