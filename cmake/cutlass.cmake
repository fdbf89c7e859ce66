# CUTLASS is headers only. They come from FLUX_CUTLASS_DIR, or from the nvidia-cutlass package, which is located without
# importing it: importing runs code of a package that flux needs nothing of but its data files.

function(flux_find_cutlass result)
  set(root "${FLUX_CUTLASS_DIR}")
  if(NOT root)
    find_package(Python REQUIRED COMPONENTS Interpreter)
    set(locate "import importlib.util as u, os; s = u.find_spec('cutlass_library'); \
print(os.path.join(os.path.dirname(s.origin), 'source') if s else '', end='')")
    # Under pip's build isolation PYTHONPATH hides the environment that flux is being installed into: look there second.
    foreach(environment "" "--unset=PYTHONPATH")
      if(NOT root)
        execute_process(COMMAND ${CMAKE_COMMAND} -E env ${environment} ${Python_EXECUTABLE} -c "${locate}"
                        OUTPUT_VARIABLE root COMMAND_ERROR_IS_FATAL ANY)
      endif()
    endforeach()
  endif()
  if(NOT EXISTS "${root}/include/cutlass/version.h")
    message(FATAL_ERROR "CUTLASS headers not found (looked in '${root}'). Install them with `pip install --no-deps nvidia-cutlass==4.2.0.0`, "
                        "or set FLUX_CUTLASS_DIR to a CUTLASS 4 source tree (the folder that holds include/cutlass).")
  endif()
  file(STRINGS "${root}/include/cutlass/version.h" major REGEX "#define CUTLASS_MAJOR [0-9]+")
  if(NOT major MATCHES "MAJOR 4")
    message(FATAL_ERROR "flux needs CUTLASS 4, found '${major}' in ${root}")
  endif()
  message(STATUS "CUTLASS: ${root}/include")
  set(${result} "${root}/include" PARENT_SCOPE)
endfunction()
