# Adds flashnext's features to the pinned llama.cpp tree, with no edit to any of its CMakeLists.txt.
#
#   cmake -S <pinned tree> -B <build> \
#       -DCMAKE_PROJECT_llama.cpp_INCLUDE=<absolute>/cmake/flashnext.cmake \
#       -DFLASHNEXT_FEATURES_FILE=<absolute, generated from the feature.toml files> ...
#
# Input, all cache variables:
#   FLASHNEXT_FEATURES_FILE  file of calls, in the order of patches/series, to these functions and nothing else:
#       fn_feature(<id> <absolute feature folder>)                          each feature once, before its other calls
#       fn_feature_hooks(<id>)                                              it has hooks in the tree
#       fn_feature_sources(<id> <target> <absolute file>...)                our sources into a target of the tree
#       fn_feature_executable(<id> <name> FILES <absolute file>... LINK <target>...)
#       fn_feature_test(<id> <name> FILES <absolute file>... LINK <target>...)
#                            not set: a vanilla build, this file then only chooses the layout below
#   FLASHNEXT_VERSION        flashnext's version                   (optional, "unknown" when empty)
#   FLASHNEXT_SERIES_HASH    hash over the series of patches       (optional, "unknown" when empty)
#   FLASHNEXT_FEATURES       ids, comma separated, for the stamp   (optional, default: those of the features file;
#                            when it names others than the features file, configuring stops)
#   FLASHNEXT_TESTS          ON builds and registers the features' C++ tests (label = id); needs no upstream tests.
#                            Sources of ours are compiled with the definition FLASHNEXT_TESTS then (fault switches)
#
# Target flashnext-all builds what the product needs: llama-server, ggml-rpc-server, llama-bench, the features'
# executables and, with FLASHNEXT_TESTS, their tests.
#
# Layout, chosen here so that every build of ours has it: shared libraries with RPATH $ORIGIN, everything in bin/.
# A folder with the executables and libraries can be renamed or moved as a whole (the installed build is renamed into
# place), and Python loads the same libllama.so that llama-server runs.

if (CMAKE_VERSION VERSION_LESS 3.19)
    message(FATAL_ERROR "flashnext needs CMake 3.19 or newer (deferred calls); this is ${CMAKE_VERSION}")
endif()

cmake_policy(PUSH)
cmake_policy(VERSION 3.19...4.0)

set(BUILD_SHARED_LIBS             ON        CACHE BOOL   "flashnext: one set of libraries for the executables and for Python")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON       CACHE BOOL   "flashnext: the build folder can be moved")
set(CMAKE_INSTALL_RPATH           "$ORIGIN" CACHE STRING "flashnext: libraries lie beside the executables")
# off unless asked for: upstream turns it on when the host happens to have libibverbs, and a build must not depend on that
set(GGML_RPC_RDMA                 OFF       CACHE BOOL   "flashnext: virtual GPUs speak TCP on loopback")

if (GGML_CUDA)
    # libcuda.so.1 belongs to the driver: a machine without one can link, and the result runs where there is one
    string(APPEND CMAKE_EXE_LINKER_FLAGS " -Wl,--allow-shlib-undefined")
endif()

option(FLASHNEXT_TESTS "flashnext: build the C++ tests of the features" OFF)
if (FLASHNEXT_TESTS)
    # at file scope: inside a function the setting would be lost with the function's scope
    enable_testing()
endif()

set(FN_BUILD_INFO_TEMPLATE "${CMAKE_CURRENT_LIST_DIR}/fn-build-info.h.in")
set(FN_BUILD_INFO_DIR      "${CMAKE_BINARY_DIR}/flashnext")

# All compiled targets below <dir>, into <out>.
function(fn_collect_targets out dir)
    get_property(found DIRECTORY "${dir}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(subdirs DIRECTORY "${dir}" PROPERTY SUBDIRECTORIES)
    set(kept "")
    foreach (target IN LISTS found)
        get_target_property(type ${target} TYPE)
        if (type MATCHES "^(EXECUTABLE|STATIC_LIBRARY|SHARED_LIBRARY|MODULE_LIBRARY|OBJECT_LIBRARY)$")
            list(APPEND kept ${target})
        endif()
    endforeach()
    foreach (subdir IN LISTS subdirs)
        fn_collect_targets(below "${subdir}")
        list(APPEND kept ${below})
    endforeach()
    set(${out} "${kept}" PARENT_SCOPE)
endfunction()

# ON in <out> when any of the files is CUDA.
function(fn_has_cuda out)
    set(${out} OFF PARENT_SCOPE)
    foreach (file IN LISTS ARGN)
        if (file MATCHES "\\.cu$")
            set(${out} ON PARENT_SCOPE)
        endif()
    endforeach()
endfunction()

function(fn_require_feature id)
    get_property(ids GLOBAL PROPERTY FN_FEATURE_IDS)
    if (NOT id IN_LIST ids)
        message(FATAL_ERROR "flashnext: feature '${id}' is used before fn_feature(${id} <folder>)")
    endif()
endfunction()

function(fn_require_files id)
    foreach (file IN LISTS ARGN)
        if (NOT IS_ABSOLUTE "${file}")
            message(FATAL_ERROR "flashnext: feature '${id}': not an absolute path: ${file}")
        endif()
        if (NOT EXISTS "${file}")
            message(FATAL_ERROR "flashnext: feature '${id}': no such file: ${file}")
        endif()
    endforeach()
endfunction()

function(fn_feature id dir)
    if (NOT id MATCHES "^[a-z0-9][a-z0-9-]*$")
        message(FATAL_ERROR "flashnext: not a feature id: '${id}'")
    endif()
    get_property(ids GLOBAL PROPERTY FN_FEATURE_IDS)
    if (id IN_LIST ids)
        message(FATAL_ERROR "flashnext: feature '${id}' is listed twice")
    endif()
    if (NOT IS_ABSOLUTE "${dir}" OR NOT IS_DIRECTORY "${dir}")
        message(FATAL_ERROR "flashnext: feature '${id}': not an absolute folder: ${dir}")
    endif()
    set_property(GLOBAL APPEND PROPERTY FN_FEATURE_IDS "${id}")
    if (IS_DIRECTORY "${dir}/src")
        set_property(GLOBAL PROPERTY FN_SRC_DIR_${id} "${dir}/src")
        set_property(GLOBAL APPEND PROPERTY FN_SRC_DIRS "${dir}/src")
    endif()
endfunction()

# Headers of this feature are for the whole tree: it has hooks there, or sources. A feature of programs alone stays out of
# the tree's command lines, so that adding it recompiles nothing.
function(fn_include_in_tree id)
    get_property(dir GLOBAL PROPERTY FN_SRC_DIR_${id})
    get_property(dirs GLOBAL PROPERTY FN_TREE_SRC_DIRS)
    if (dir AND NOT dir IN_LIST dirs)
        set_property(GLOBAL APPEND PROPERTY FN_TREE_SRC_DIRS "${dir}")
    endif()
endfunction()

# Its hooks include its headers, which may be all that they need of it.
function(fn_feature_hooks id)
    fn_require_feature(${id})
    fn_include_in_tree(${id})
endfunction()

function(fn_feature_sources id target)
    fn_require_feature(${id})
    fn_require_files(${id} ${ARGN})
    if (NOT TARGET ${target})
        if (target STREQUAL "ggml-cuda")
            message(STATUS "flashnext: ${id}: left out of this build (no CUDA): ${ARGN}")
            return()
        endif()
        message(FATAL_ERROR "flashnext: feature '${id}': the tree has no target '${target}'")
    endif()
    fn_has_cuda(cuda ${ARGN})
    if (cuda AND NOT target STREQUAL "ggml-cuda")
        message(FATAL_ERROR "flashnext: feature '${id}': CUDA sources belong to target ggml-cuda, not to '${target}'")
    endif()
    fn_include_in_tree(${id})
    target_sources(${target} PRIVATE ${ARGN})
    # target llama is a unity build: a file of ours inside a batch would see, and leak, other files' static names
    # the target's own folder: upstream's files find headers like common.cuh beside them, ours lie elsewhere
    get_target_property(target_dir ${target} SOURCE_DIR)
    set_source_files_properties(${ARGN} TARGET_DIRECTORY ${target}
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON INCLUDE_DIRECTORIES "${target_dir}")
    if (FLASHNEXT_TESTS)
        # switches that make the product fail on purpose exist in builds for tests alone
        set_property(SOURCE ${ARGN} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_DEFINITIONS FLASHNEXT_TESTS)
    endif()
endfunction()

# One executable of ours, with upstream's internal headers reachable. Sets <out> to ON when it was made.
function(fn_add_program out id name)
    cmake_parse_arguments(PARSE_ARGV 3 arg "" "" "FILES;LINK")
    fn_require_feature(${id})
    if (arg_UNPARSED_ARGUMENTS OR NOT arg_FILES)
        message(FATAL_ERROR "flashnext: feature '${id}': ${name}: expected FILES <file>... LINK <target>...")
    endif()
    fn_require_files(${id} ${arg_FILES})
    set(${out} OFF PARENT_SCOPE)
    fn_has_cuda(cuda ${arg_FILES})
    if (NOT TARGET ggml-cuda AND (cuda OR "ggml-cuda" IN_LIST arg_LINK))
        message(STATUS "flashnext: ${id}: left out of this build (no CUDA): ${name}")
        return()
    endif()
    foreach (target IN LISTS arg_LINK)
        if (NOT TARGET ${target})
            message(FATAL_ERROR "flashnext: feature '${id}': ${name}: the tree has no target '${target}'")
        endif()
    endforeach()
    find_package(Threads REQUIRED)
    add_executable(${name} ${arg_FILES})
    target_compile_features(${name} PRIVATE cxx_std_17)
    target_link_libraries(${name} PRIVATE ${arg_LINK} Threads::Threads)
    target_include_directories(${name} PRIVATE
        "${CMAKE_SOURCE_DIR}/include" "${CMAKE_SOURCE_DIR}/src" "${CMAKE_SOURCE_DIR}/common"
        "${CMAKE_SOURCE_DIR}/ggml/include" "${CMAKE_SOURCE_DIR}/ggml/src")
    if (cuda)
        get_target_property(architectures ggml-cuda CUDA_ARCHITECTURES)
        set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${architectures}")
        target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}/ggml/src/ggml-cuda")
    endif()
    set_property(GLOBAL APPEND PROPERTY FN_PROGRAMS "${name}")
    set(${out} ON PARENT_SCOPE)
endfunction()

function(fn_feature_executable id name)
    fn_add_program(made ${id} ${name} ${ARGN})
endfunction()

function(fn_feature_test id name)
    if (NOT FLASHNEXT_TESTS)
        return()
    endif()
    fn_add_program(made ${id} ${name} ${ARGN})
    if (made)
        add_test(NAME ${name} COMMAND ${name})
        set_tests_properties(${name} PROPERTIES LABELS "${id}" TIMEOUT 300 SKIP_RETURN_CODE 77)
    endif()
endfunction()

# Runs last: include paths for every target, the build's stamp, the one target to build.
function(fn_finish)
    get_property(ids GLOBAL PROPERTY FN_FEATURE_IDS)
    get_property(src_dirs GLOBAL PROPERTY FN_SRC_DIRS)
    get_property(tree_src_dirs GLOBAL PROPERTY FN_TREE_SRC_DIRS)
    get_property(programs GLOBAL PROPERTY FN_PROGRAMS)

    list(JOIN ids "," FN_BUILD_FEATURES)
    if (FLASHNEXT_FEATURES AND NOT FLASHNEXT_FEATURES STREQUAL FN_BUILD_FEATURES)
        message(FATAL_ERROR "flashnext: FLASHNEXT_FEATURES says '${FLASHNEXT_FEATURES}', "
                            "the features file has '${FN_BUILD_FEATURES}'")
    endif()
    list(JOIN ids "\\\",\\\"" FN_BUILD_FEATURES_JSON)
    if (ids)
        set(FN_BUILD_FEATURES_JSON "\"[\\\"${FN_BUILD_FEATURES_JSON}\\\"]\"")
    else()
        set(FN_BUILD_FEATURES_JSON "\"[]\"")
    endif()
    set(FN_BUILD_VERSION     "${FLASHNEXT_VERSION}")
    set(FN_BUILD_SERIES_HASH "${FLASHNEXT_SERIES_HASH}")
    foreach (value IN ITEMS "${FN_BUILD_VERSION}" "${FN_BUILD_SERIES_HASH}")
        if (NOT value MATCHES "^[A-Za-z0-9.+_-]*$")
            message(FATAL_ERROR "flashnext: not a version or hash: '${value}'")
        endif()
    endforeach()
    configure_file("${FN_BUILD_INFO_TEMPLATE}" "${FN_BUILD_INFO_DIR}/fn-build-info.h" @ONLY)

    fn_collect_targets(targets "${CMAKE_SOURCE_DIR}")
    foreach (target IN LISTS targets)
        if (target IN_LIST programs)
            target_include_directories(${target} PRIVATE ${src_dirs} "${FN_BUILD_INFO_DIR}")
        elseif (ids)
            target_include_directories(${target} PRIVATE ${tree_src_dirs} "${FN_BUILD_INFO_DIR}")
        endif()
    endforeach()

    set(wanted ${programs})
    foreach (target IN ITEMS llama-server ggml-rpc-server llama-bench)
        if (TARGET ${target})
            list(APPEND wanted ${target})
        endif()
    endforeach()
    add_custom_target(flashnext-all DEPENDS ${wanted})
    message(STATUS "flashnext: features: ${FN_BUILD_FEATURES}")
endfunction()

# After the last line of the tree's CMakeLists.txt: every target exists, and the calls run in its directory's scope.
if (FLASHNEXT_FEATURES_FILE)
    if (NOT EXISTS "${FLASHNEXT_FEATURES_FILE}")
        message(FATAL_ERROR "flashnext: no such file: ${FLASHNEXT_FEATURES_FILE}")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${FLASHNEXT_FEATURES_FILE}")
    # upstream's warnings and sanitizers for our executables as well
    cmake_language(DEFER CALL llama_add_compile_flags)
    if (GGML_CUDA AND FLASHNEXT_TESTS)
        # CUDA tests are targets of this directory, and a language cannot be enabled in a deferred call. Enabled before
        # upstream does it, without architectures, it would choose CMake's instead of upstream's.
        if (NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
            message(FATAL_ERROR "flashnext: FLASHNEXT_TESTS with GGML_CUDA needs CMAKE_CUDA_ARCHITECTURES")
        endif()
        enable_language(CUDA)
    endif()
    cmake_language(DEFER CALL include "${FLASHNEXT_FEATURES_FILE}")
endif()
cmake_language(DEFER CALL fn_finish)

cmake_policy(POP)
