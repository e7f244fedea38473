#pragma once

#include <cstdarg>
#include <cstdio>
#include <string>

// One line "fn:cache:<event> {json}" on stderr. It begins with a line end, since the server's log writes its lines there
// in pieces, from a thread of its own. The values are ours: no string in them needs escaping beyond
// fn_cache_json_string.

inline std::string fn_cache_json_string(const std::string & s) {
    std::string out = "\"";
    for (const char c : s) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += (unsigned char) c < 0x20 ? ' ' : c;
    }
    return out + "\"";
}

inline void fn_cache_marker(const char * event, const std::string & json) {
    fprintf(stderr, "\nfn:cache:%s %s\n", event, json.c_str());
    fflush(stderr);
}
