#include "fn-vgpu-device.h"
#include "fn-vgpu-options.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

static int n_failed = 0;

#define CHECK(x)                                                            \
    do {                                                                    \
        if (!(x)) {                                                         \
            fprintf(stderr, "%s:%d: FAILED: %s\n", __FILE__, __LINE__, #x); \
            n_failed++;                                                     \
        }                                                                   \
    } while (0)

static const size_t MiB = 1024 * 1024;

static double seconds_of(const std::function<void()> & work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static fn_vgpu_options with_memory(size_t bytes) {
    fn_vgpu_options options;
    options.memory_bytes = bytes;
    return options;
}

static ggml_backend_buffer_t alloc(fn_vgpu_device & device, size_t size) {
    return ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device.dev()), size);
}

// A product of two matrices in one buffer of `buft`, filled with fixed values.
struct product {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           a;
    ggml_tensor *           b;
    ggml_tensor *           out;
    ggml_cgraph *           graph;

    product(ggml_backend_buffer_type_t buft, int64_t n) {
        ctx.reset(ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true }));
        a     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, n);
        b     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, n);
        out   = ggml_mul_mat(ctx.get(), a, b);
        graph = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(graph, out);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
        if (!buffer) {
            return;
        }
        std::vector<float> values((size_t) (n * n));
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = std::sin((float) i);
        }
        ggml_backend_tensor_set(a, values.data(), 0, ggml_nbytes(a));
        ggml_backend_tensor_set(b, values.data(), 0, ggml_nbytes(b));
    }

    std::vector<float> result() const {
        std::vector<float> values((size_t) ggml_nelements(out));
        ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
        return values;
    }
};

static bool parse(std::initializer_list<const char *> args, fn_vgpu_options & options, std::string & error) {
    std::vector<const char *> argv = { "fn-vgpu" };
    argv.insert(argv.end(), args);
    return fn_vgpu_options_parse((int) argv.size(), argv.data(), options, error);
}

static void test_options() {
    std::string error;
    {
        fn_vgpu_options options;
        CHECK(parse({ "--memory", "0" }, options, error));
        CHECK(options.host == "127.0.0.1" && options.port == 0 && options.memory_bytes == 0 && options.parent_death);
    }
    {
        fn_vgpu_options options;
        CHECK(parse({ "--port",
                      "50052",
                      "--control-port=50053",
                      "--host",
                      "localhost",
                      "--name",
                      "gpu-0",
                      "--memory",
                      "1.5GiB",
                      "--threads",
                      "2",
                      "--upload-delay-us",
                      "10",
                      "--compute-delay-us",
                      "20",
                      "--upload-mib-s",
                      "30",
                      "--fault",
                      "alloc:3",
                      "--fault",
                      "upload-corrupt:1",
                      "--parent-death",
                      "off" },
                    options, error));
        CHECK(options.port == 50052 && options.control_port == 50053 && options.host == "127.0.0.1");
        CHECK(options.name == "gpu-0" && options.memory_bytes == 1536 * MiB && options.n_threads == 2);
        CHECK(options.upload_delay_us == 10 && options.compute_delay_us == 20 && options.upload_mib_s == 30);
        CHECK(options.faults.size() == 2 && options.faults[0].event == FN_VGPU_EVENT_ALLOC && options.faults[0].n == 3);
        CHECK(options.faults[1].event == FN_VGPU_EVENT_UPLOAD_CORRUPT && options.faults[1].n == 1);
        CHECK(!options.parent_death);
    }
    // wrong values: the option's name and the reason are in the message
    const std::vector<std::pair<std::vector<const char *>, const char *>> wrong = {
        { { "--host", "0.0.0.0" },                "no authentication"  },
        { { "--host", "192.168.1.2" },            "no authentication"  },
        { { "--host", "example" },                "no authentication"  },
        { { "--host", "::1" },                    "no authentication"  },
        { { "--host", "" },                       "no authentication"  },
        { { "--port", "65536" },                  "--port"             },
        { { "--port", "-1" },                     "--port"             },
        { { "--port", "1e3" },                    "--port"             },
        { { "--memory", "12MB" },                 "KiB, MiB or GiB"    },
        { { "--memory", "GiB" },                  "--memory"           },
        { { "--memory", "-1GiB" },                "--memory"           },
        { { "--memory", "1..5GiB" },              "--memory"           },
        { { "--memory", "99999999999999GiB" },    "--memory"           },
        { { "--memory", "99999999999999999999" }, "--memory"           },
        { { "--threads", "0" },                   "--threads"          },
        { { "--name", "a\"b" },                   "--name"             },
        { { "--upload-delay-us", "3600000001" },  "--upload-delay-us"  },
        { { "--upload-mib-s", "0" },              "--upload-mib-s"     },
        { { "--fault", "alloc" },                 "--fault"            },
        { { "--fault", "alloc:0" },               "--fault"            },
        { { "--fault", "explode:1" },             "--fault"            },
        { { "--parent-death", "maybe" },          "--parent-death"     },
        { { "--port" },                           "a value is missing" },
        { { "--ports", "1" },                     "no such option"     },
        { { "stray" },                            "no such option"     },
    };
    for (const auto & [args, expected] : wrong) {
        std::vector<const char *> argv = { "fn-vgpu" };
        argv.insert(argv.end(), args.begin(), args.end());
        fn_vgpu_options options;
        error.clear();
        const bool ok = fn_vgpu_options_parse((int) argv.size(), argv.data(), options, error);
        CHECK(!ok);
        CHECK(error.find(expected) != std::string::npos);
        if (ok || error.find(expected) == std::string::npos) {
            fprintf(stderr, "  with %s: %s\n", args[0], error.c_str());
        }
    }
    // every option that exists is in the help
    for (const char * option :
         { "--port", "--control-port", "--host", "--name", "--memory", "--threads", "--upload-delay-us",
           "--upload-mib-s", "--compute-delay-us", "--fault", "--parent-death", "--help" }) {
        CHECK(std::string(fn_vgpu_help()).find(std::string("\n  ") + option) != std::string::npos);
    }
}

static void test_limit_and_books() {
    std::string refused;
    {
        fn_vgpu_device device(with_memory(8 * MiB), [&](const char * event, const std::string & json) {
            refused = std::string(event) + " " + json;
        });
        size_t         free  = 0;
        size_t         total = 0;
        ggml_backend_dev_memory(device.dev(), &free, &total);
        CHECK(free == 8 * MiB && total == 8 * MiB);

        ggml_backend_buffer_ptr a(alloc(device, 5 * MiB));
        CHECK(a);
        ggml_backend_dev_memory(device.dev(), &free, &total);
        CHECK(free == 3 * MiB && total == 8 * MiB);

        // one byte too many fails and changes nothing; the exact rest fits
        CHECK(alloc(device, 3 * MiB + 1) == NULL);
        CHECK(refused == "refused {\"name\":\"vgpu\",\"asked_bytes\":3145729,\"free_bytes\":3145728}");
        CHECK(device.stats().allocated_bytes == 5 * MiB);
        ggml_backend_buffer_ptr b(alloc(device, 3 * MiB));
        CHECK(b);
        CHECK(alloc(device, 1) == NULL);

        a.reset();
        CHECK(device.stats().allocated_bytes == 3 * MiB);
        ggml_backend_buffer_ptr c(alloc(device, 5 * MiB));
        CHECK(c);
        b.reset();
        c.reset();

        const fn_vgpu_stats s = device.stats();
        CHECK(s.allocated_bytes == 0 && s.peak_bytes == 8 * MiB && s.buffers == 0);
        CHECK(s.allocations == 3 && s.frees == 3 && s.refusals == 2 && s.faults == 0);

        // memory taken away: what is allocated stays, free is 0 and never wraps around
        ggml_backend_buffer_ptr d(alloc(device, 4 * MiB));
        device.set_memory(2 * MiB);
        ggml_backend_dev_memory(device.dev(), &free, &total);
        CHECK(free == 0 && total == 2 * MiB);
        CHECK(alloc(device, 1) == NULL);
        CHECK(device.stats_json().find("\"free_bytes\":0,\"allocated_bytes\":4194304,") != std::string::npos);
    }
    {
        // more than any host has: the limit lets it through, the host does not, and the books stay right
        fn_vgpu_device device(with_memory((size_t) 1 << 58), {});
        CHECK(alloc(device, (size_t) 1 << 57) == NULL);
        CHECK(device.stats().allocated_bytes == 0 && device.stats().refusals == 1);
    }
}

static void test_transfers() {
    fn_vgpu_device device(with_memory(64 * MiB), {});
    {
        product p(ggml_backend_dev_buffer_type(device.dev()), 64);
        CHECK(p.buffer);
        const size_t  n_bytes = ggml_nbytes(p.a);
        fn_vgpu_stats s       = device.stats();
        CHECK(s.uploads == 2 && s.upload_bytes == 2 * n_bytes && s.downloads == 0);

        CHECK(ggml_backend_buffer_copy_tensor(p.a, p.out));
        ggml_backend_tensor_memset(p.b, 0, 0, n_bytes);
        std::vector<uint8_t> a(n_bytes);
        std::vector<uint8_t> copy(n_bytes);
        std::vector<uint8_t> zero(n_bytes);
        ggml_backend_tensor_get(p.a, a.data(), 0, n_bytes);
        ggml_backend_tensor_get(p.out, copy.data(), 0, n_bytes);
        ggml_backend_tensor_get(p.b, zero.data(), 0, n_bytes);
        CHECK(a == copy);
        CHECK(zero == std::vector<uint8_t>(n_bytes, 0));

        s = device.stats();
        CHECK(s.copies == 1 && s.copy_bytes == n_bytes && s.downloads == 3 && s.download_bytes == 3 * n_bytes);

        ggml_backend_buffer_clear(p.buffer.get(), 7);
        ggml_backend_tensor_get(p.a, a.data(), 0, n_bytes);
        CHECK(a == std::vector<uint8_t>(n_bytes, 7));
    }
    CHECK(device.stats().allocated_bytes == 0);
}

// The device computes what the CPU backend computes, to the byte, and its memory is host memory to the CPU backend.
static void test_compute() {
    fn_vgpu_device             device(with_memory(64 * MiB), {});
    ggml_backend_buffer_type_t buft = ggml_backend_dev_buffer_type(device.dev());
    CHECK(ggml_backend_buft_is_host(buft));

    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(cpu.get(), 1);
    CHECK(ggml_backend_supports_buft(cpu.get(), buft));

    product on_cpu(ggml_backend_cpu_buffer_type(), 96);
    CHECK(ggml_backend_graph_compute(cpu.get(), on_cpu.graph) == GGML_STATUS_SUCCESS);

    product          on_device(buft, 96);
    ggml_backend_ptr backend(ggml_backend_dev_init(device.dev(), NULL));
    CHECK(ggml_backend_get_device(backend.get()) == device.dev());
    CHECK(ggml_backend_get_default_buffer_type(backend.get()) == buft);
    CHECK(ggml_backend_graph_compute(backend.get(), on_device.graph) == GGML_STATUS_SUCCESS);
    CHECK(on_device.result() == on_cpu.result());
    CHECK(device.stats().graphs == 1);

    product by_cpu(buft, 96);
    CHECK(ggml_backend_graph_compute(cpu.get(), by_cpu.graph) == GGML_STATUS_SUCCESS);
    CHECK(by_cpu.result() == on_cpu.result());

    // the RPC server leaves its backend behind: the device frees this one
    CHECK(ggml_backend_dev_init(device.dev(), NULL) != NULL);
}

static void test_alloc_fault() {
    fn_vgpu_options options = with_memory(64 * MiB);
    options.faults          = {
        { FN_VGPU_EVENT_ALLOC, 2 },
    };
    std::vector<std::string> seen;
    fn_vgpu_device           device(options, [&](const char * event, const std::string &) { seen.push_back(event); });

    ggml_backend_buffer_ptr first(alloc(device, MiB));
    CHECK(first);
    CHECK(alloc(device, MiB) == NULL);  // the second, once
    ggml_backend_buffer_ptr third(alloc(device, MiB));
    CHECK(third);
    CHECK(device.stats().faults == 1 && device.stats().refusals == 1 && device.stats().allocated_bytes == 2 * MiB);
    CHECK(seen == std::vector<std::string>{ "fault" });

    // armed while running: counts from now
    device.arm({ FN_VGPU_EVENT_ALLOC, 1 });
    CHECK(alloc(device, MiB) == NULL);
    ggml_backend_buffer_ptr fifth(alloc(device, MiB));
    CHECK(fifth);
}

static void test_upload_corrupt_fault() {
    fn_vgpu_options options = with_memory(64 * MiB);
    options.faults          = {
        { FN_VGPU_EVENT_UPLOAD_CORRUPT, 2 },
    };
    fn_vgpu_device device(options, {});
    product        p(ggml_backend_dev_buffer_type(device.dev()), 16);  // uploads a, then b, with the same values

    const size_t         n_bytes = ggml_nbytes(p.a);
    std::vector<uint8_t> a(n_bytes);
    std::vector<uint8_t> b(n_bytes);
    ggml_backend_tensor_get(p.a, a.data(), 0, n_bytes);
    ggml_backend_tensor_get(p.b, b.data(), 0, n_bytes);
    int n_different = 0;
    for (size_t i = 0; i < n_bytes; i++) {
        n_different += a[i] != b[i];
    }
    CHECK(n_different == 1);
}

static void test_delays() {
    {
        fn_vgpu_options options = with_memory(64 * MiB);
        options.upload_delay_us = 30 * 1000;
        fn_vgpu_device device(options, {});
        CHECK(seconds_of([&] { product p(ggml_backend_dev_buffer_type(device.dev()), 16); }) >= 0.060);
    }
    {
        // two uploads of 1 MiB at 20 MiB/s
        fn_vgpu_options options = with_memory(64 * MiB);
        options.upload_mib_s    = 20;
        fn_vgpu_device device(options, {});
        CHECK(seconds_of([&] { product p(ggml_backend_dev_buffer_type(device.dev()), 512); }) >= 0.100);
    }
    {
        fn_vgpu_options options  = with_memory(64 * MiB);
        options.compute_delay_us = 50 * 1000;
        fn_vgpu_device   device(options, {});
        product          p(ggml_backend_dev_buffer_type(device.dev()), 16);
        ggml_backend_ptr backend(ggml_backend_dev_init(device.dev(), NULL));
        CHECK(seconds_of([&] { ggml_backend_graph_compute(backend.get(), p.graph); }) >= 0.050);
    }
}

// A hang lasts until stop(), and after it neither hangs nor delays hold anything up.
static void test_hang_and_stop() {
    fn_vgpu_options options  = with_memory(64 * MiB);
    options.compute_delay_us = 3600ull * 1000 * 1000;
    options.faults           = {
        { FN_VGPU_EVENT_HANG, 1 },
    };
    fn_vgpu_device    device(options, {});
    product           p(ggml_backend_dev_buffer_type(device.dev()), 16);
    ggml_backend_ptr  backend(ggml_backend_dev_init(device.dev(), NULL));
    std::atomic<bool> done(false);
    ggml_status       status = GGML_STATUS_FAILED;
    std::thread       server([&] {
        status = ggml_backend_graph_compute(backend.get(), p.graph);
        done   = true;
    });
    const auto        deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (device.stats().faults == 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
    }
    CHECK(device.stats().faults == 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!done);
    device.stop();
    server.join();
    CHECK(status == GGML_STATUS_SUCCESS);  // anything else makes the RPC server abort
}

int main() {
    test_options();
    test_limit_and_books();
    test_transfers();
    test_compute();
    test_alloc_fault();
    test_upload_corrupt_fault();
    test_delays();
    test_hang_and_stop();
    if (n_failed > 0) {
        fprintf(stderr, "%d checks failed\n", n_failed);
        return 1;
    }
    printf("ok\n");
    return 0;
}
