// Python functions as the sink of a stream.
#pragma once

#include <pybind11/pybind11.h>

#include "core/pipeline/pipeline.h"
#include "core/write/writer.h"

namespace ptsave {

// Calls `poll`, then write(memoryview) for data and skip(nbytes) for holes, with the GIL, on the
// thread that without_gil() has taken it from.  All three must outlive the sink.
StreamSink make_stream_sink(const pybind11::function& write, const pybind11::function& skip,
                            const Poll& poll);

}  // namespace ptsave
