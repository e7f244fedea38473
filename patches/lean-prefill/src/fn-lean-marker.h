#pragma once

#include <cstdio>
#include <string>

// One line "fn:lean:<event> {json}" on stderr; it begins with a line end, as the cache's markers do and for their reason.
inline void fn_lean_marker(const char * event, const std::string & json) {
    fprintf(stderr, "\nfn:lean:%s %s\n", event, json.c_str());
    fflush(stderr);
}
