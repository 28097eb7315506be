#!/bin/bash
# The appliance of the environment in OURS_BIN, one worker a model. OURS_MODELS names the ONNX files (default: mlp rec),
# OURS_BUNDLE, where it is set, the folder of a bundle that is served as well.
set -eu
state=$(mktemp -d)
touch "$state/config.toml"
models=()
for name in ${OURS_MODELS-mlp rec}; do
    models+=(--onnx "$name=$MODELS_DIR/$name.onnx")
done
if [ -n "${OURS_BUNDLE:-}" ]; then
    models+=(--bundle "$OURS_BUNDLE")
fi
exec "${OURS_BIN:?set OURS_BIN to the bin folder that holds appliance}/appliance" run "${models[@]}" \
    --http "127.0.0.1:$PORT" --state-dir "$state" --config "$state/config.toml"
