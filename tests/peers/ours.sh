#!/bin/bash
# The appliance of the environment in OURS_BIN; OURS_MODELS names the models (default: mlp rec), one worker each.
set -eu
state=$(mktemp -d)
touch "$state/config.toml"
models=()
for name in ${OURS_MODELS:-mlp rec}; do
    models+=(--onnx "$name=$MODELS_DIR/$name.onnx")
done
exec "${OURS_BIN:?set OURS_BIN to the bin folder that holds appliance}/appliance" run "${models[@]}" \
    --http "127.0.0.1:$PORT" --state-dir "$state" --config "$state/config.toml"
