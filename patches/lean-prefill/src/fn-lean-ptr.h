#pragma once

#include <memory>

// What a llama_context has to know about its staging memory.

struct fn_lean;

struct fn_lean_deleter {
    void operator()(fn_lean * lean) const;
};

using fn_lean_ptr = std::unique_ptr<fn_lean, fn_lean_deleter>;
