# Settings that compile without an error and then cost half the speed, or all of it. Called before nvcc is looked for,
# so that a wrong command line fails at once, and again when CMake has filled in its own flags.

function(flux_refuse_traps)
  foreach(arch IN LISTS FLUX_CUDA_ARCHS)
    if(arch STREQUAL "90")
      message(FATAL_ERROR "FLUX_CUDA_ARCHS=90 compiles, but to code without wgmma and TMA. Hopper needs FLUX_CUDA_ARCHS=90a.")
    elseif(NOT arch STREQUAL "90a")
      message(FATAL_ERROR "FLUX_CUDA_ARCHS='${FLUX_CUDA_ARCHS}': flux has kernels for 90a only.")
    endif()
  endforeach()
  if(NOT FLUX_CUDA_ARCHS)
    message(FATAL_ERROR "FLUX_CUDA_ARCHS is empty; Hopper needs FLUX_CUDA_ARCHS=90a.")
  endif()

  if(NOT CMAKE_BUILD_TYPE MATCHES "^(Release|RelWithDebInfo)$")
    message(FATAL_ERROR "CMAKE_BUILD_TYPE=${CMAKE_BUILD_TYPE} leaves assert() in the kernels, and one assert() makes ptxas "
                        "serialise every wgmma around it (C7510). Use Release or RelWithDebInfo, which define NDEBUG.")
  endif()
  string(TOUPPER ${CMAKE_BUILD_TYPE} config)
  if(DEFINED CMAKE_CUDA_FLAGS_${config} AND NOT CMAKE_CUDA_FLAGS_${config} MATCHES "-D ?NDEBUG")
    message(FATAL_ERROR "CMAKE_CUDA_FLAGS_${config}='${CMAKE_CUDA_FLAGS_${config}}' lacks -DNDEBUG: one assert() makes "
                        "ptxas serialise every wgmma around it (C7510).")
  endif()

  set(flags "${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_${config}} $ENV{CUDAFLAGS} $ENV{NVCC_PREPEND_FLAGS} $ENV{NVCC_APPEND_FLAGS} ")
  if(CMAKE_CUDA_SEPARABLE_COMPILATION OR flags MATCHES "-rdc[= ]*true|--relocatable-device-code[= ]*true|-dc |--device-c |-dlto")
    message(FATAL_ERROR "Relocatable device code (-rdc=true, -dc, -dlto) makes ptxas drop setmaxnreg from the kernels (C7504). "
                        "Code that needs it belongs in a library of its own. Flags: ${flags}")
  endif()
  if(flags MATCHES "-UNDEBUG|-G |--device-debug ")
    message(FATAL_ERROR "-UNDEBUG and -G leave assert() or unoptimised code in the kernels. Flags: ${flags}")
  endif()
endfunction()
