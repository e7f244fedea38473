#pragma once

#include <string>

#include <unistd.h>

// One line "fn:phase:<event> {json}" on stderr. The server's log writes its lines there in pieces, from a thread of its
// own: the marker is one write that begins with a line end, so that it always stands on a line of its own.
inline void fn_phase_marker(const char * event, const std::string & json) {
    const std::string line = std::string("\nfn:phase:") + event + " " + json + "\n";
    for (size_t done = 0; done < line.size();) {
        const ssize_t n = write(STDERR_FILENO, line.data() + done, line.size() - done);
        if (n <= 0) {
            return; // nobody can be told
        }
        done += (size_t) n;
    }
}
