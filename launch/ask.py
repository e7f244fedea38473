"""Ask one question over the OpenAI-compatible API and print the answer as it comes: the demo's client.

Usage: ask.py BASE_URL QUESTION [MAX_TOKENS]. Needs nothing but Python.
"""

import http.client
import json
import signal
import sys
import urllib.request


def main() -> int:
    url, question = sys.argv[1], sys.argv[2]
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": limit,
        "stream": True,
        "seed": 1,
        "ignore_eos": True,  # random weights end a text at any moment
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    timings = {}
    print(f"> {question}")
    with opener.open(request, timeout=300) as answer:
        for raw in answer:
            line = raw.decode("utf-8", "replace").strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk.get("choices", []):
                delta = choice.get("delta", {})
                text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                sys.stdout.write("".join(c if c.isprintable() else "." for c in text))
                sys.stdout.flush()
            timings = chunk.get("timings", timings)
    print()
    if timings:
        print(
            f"prompt: {timings['prompt_n']} tokens at {timings['prompt_per_second']:.1f} t/s; "
            f"answer: {timings['predicted_n']} tokens at {timings['predicted_per_second']:.1f} t/s"
        )
    return 0 if timings.get("predicted_n") else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    try:
        code = main()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"error: no answer from {sys.argv[1]}: {error}", file=sys.stderr)
        code = 8
    raise SystemExit(code)
