"""An inference server in the fewest lines: raw FP32 in, raw FP32 out, one onnxruntime thread."""

import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, Request, Response

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"])
(x,) = session.get_inputs()
app = FastAPI()


@app.post("/")
async def infer(request: Request) -> Response:
    """The header `shape` has the shape of the body."""
    shape = tuple(map(int, request.headers["shape"].split(",")))
    (y,) = session.run(None, {x.name: np.frombuffer(await request.body(), np.float32).reshape(shape)})
    return Response(y.tobytes(), media_type="application/octet-stream")
