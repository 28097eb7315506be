"""A model of Triton's Python backend: the ONNX file of BENCH_MODEL in onnxruntime, one thread an instance."""

import os

import onnxruntime
import triton_python_backend_utils as triton


def opened() -> onnxruntime.InferenceSession:
    """The session."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"])


class TritonPythonModel:
    """What the backend looks for, by this name."""

    @staticmethod
    def auto_complete_config(config):  # noqa: ANN001, ANN205 - of a module that only the backend has
        """Declare the tensors of the file."""
        session = opened()
        config.set_max_batch_size(0)
        for add, tensors in ((config.add_input, session.get_inputs()), (config.add_output, session.get_outputs())):
            for one in tensors:
                add({"name": one.name, "data_type": "TYPE_FP32", "dims": [-1] * len(one.shape)})
        return config

    def initialize(self, _args):  # noqa: ANN001, ANN201 - likewise
        """Load."""
        self.session = opened()

    def execute(self, requests):  # noqa: ANN001, ANN201 - likewise
        """Answer each request."""
        (x,), (y,) = self.session.get_inputs(), self.session.get_outputs()
        answers = []
        for request in requests:
            fed = {x.name: triton.get_input_tensor_by_name(request, x.name).as_numpy()}
            answers.append(triton.InferenceResponse([triton.Tensor(y.name, self.session.run(None, fed)[0])]))
        return answers
