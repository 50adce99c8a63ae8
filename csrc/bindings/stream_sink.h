// Makes a stream sink from Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include "core/pipeline/pipeline.h"
#include "core/write/writer.h"

namespace ptsave {

// Calls `poll`, and then, with the GIL, write(memoryview) for data or skip(nbytes) for a hole.
// Runs on a thread inside without_gil().  All three must outlive the sink.
StreamSink make_stream_sink(const pybind11::function& write, const pybind11::function& skip,
                            const Poll& poll);

}  // namespace ptsave
