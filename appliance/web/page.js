"use strict";

const RETRY_MS = 2000;
const SILENCE_MS = 6000;
const POINTS = 720;
const [WIDTH, HEIGHT] = [720, 100];

// What is served

function slot(model, update) {
  const found = update?.slots.find((one) => one.digest === model.digest);
  return found ? `${found.state}, ${found.digest.slice(0, 12)}`
    : model.digest ? `as given, ${model.digest.slice(0, 12)}` : "as given";
}

function card({ model, worker, leased, slot }) {
  const state = worker.state === "ready" && !model.ready ? "not ready" : worker.state;
  const precision = Object.entries(model.precision).map(([graph, kind]) => `${graph} ${kind}`).join(", ");
  const item = make("li", {},
    make("h3", {}, `${model.name} ${model.version} `,
      make("span", { className: model.ready ? "good" : "bad", textContent: `● ${state}` })),
    model.reason?.includes(":") ? make("p", { className: "bad", textContent: model.reason }) : null,
    model.degraded ? make("p", { className: "warn", textContent: `on a fallback: ${model.degraded}` }) : null,
    make("dl", { className: "facts" }, ...facts({
      "runtime": model.runtime ?? "none yet",
      "precision": precision,
      "slot": slot,
      "trust": model.trust,
      "requests": `${model.running} running, ${model.waiting} waiting`
        + (model.service_ms === null ? "" : `, ${short(model.service_ms)} ms each`),
      "worker": worker.pid ? `process ${worker.pid}, ${worker.restarts} restarts` : `none, ${worker.restarts} restarts`,
      "memory": leased ? bytes(leased) : "none held",
    })));
  item.dataset.ready = model.ready;
  return item;
}

const sum = (terms) => Object.values(terms).reduce((total, size) => total + size, 0);

function showModels(status) {
  const leased = Object.fromEntries(status.memory.models.map((one) => [one.name, sum(one.lease_bytes)]));
  const cards = status.models.map((model, i) => ({
    model, worker: status.workers[i], leased: leased[model.name], slot: slot(model, status.update),
  }));
  draw("models", cards, () => cards.length ? cards.map(card)
    : [make("li", { textContent: "No models: give one with appliance run --bundle FOLDER." })]);
}

// Memory

function showMemory({ memory, memory_bytes: machine }) {
  const models = memory.models.map((one) => [one.name, sum(one.lease_bytes)]).filter(([, size]) => size > 0);
  const parts = models.map(([name, size], i) => [name, size, `c${i % 4}`]);
  const other = memory.leased_bytes - models.reduce((total, [, size]) => total + size, 0);
  if (other > 0) parts.push(["other work", other, "c3"]);
  parts.push(["free for models", Math.max(memory.budget_bytes - memory.leased_bytes, 0), "free"]);
  if (machine?.total > memory.budget_bytes) parts.push(["left to the system", machine.total - memory.budget_bytes, "reserve"]);
  const extra = {
    "budget": `${bytes(memory.leased_bytes)} of ${bytes(memory.budget_bytes)} leased`,
    "the machine has left": machine?.available && bytes(machine.available),
    "held by the GPU": memory.nvmap_bytes && bytes(memory.nvmap_bytes),
    "pressure": memory.step,
  };
  draw("memory", [parts.map(([name, size]) => [name, bytes(size)]), extra], () => [
    make("div", { className: "bar", role: "img", ariaLabel: parts.map(([name, size]) => `${name} ${bytes(size)}`).join(", ") },
      ...parts.map(([, size, kind]) => {
        const piece = make("span", { className: kind });
        piece.style.flex = `${size} 1 0`;
        return piece;
      })),
    make("ul", { className: "legend" }, ...parts.map(([name, size, kind]) =>
      make("li", { className: kind, textContent: `${name} ${bytes(size)}` }))),
    make("dl", { className: "facts" }, ...facts(extra)),
  ]);
}

// The last hour

let points = [];
let step_s = 5;
const PLOTS = [
  ["Requests a second", "", [["per_s", "answered"]]],
  ["Time to an answer", " ms", [["p50_ms", "half"], ["p95_ms", "95 %"], ["p99_ms", "99 %"]]],
  ["Queue", "", [["waiting", "waiting"]]],
  ["Not answered", "", [["dropped", "refused or too late"], ["failed", "failed"]]],
];

function path(key, most) {
  let pen = "M";
  return points.map((point, i) => {
    if (point[key] === null) {
      pen = "M";
      return "";
    }
    const x = WIDTH - (points.length - 1 - i) * WIDTH / (POINTS - 1);
    const y = HEIGHT - 4 - point[key] / most * (HEIGHT - 8);
    const mark = `${pen}${x.toFixed(1)} ${y.toFixed(1)}${pen === "M" ? "h.1" : ""}`; // a lone point shows, too
    pen = "L";
    return mark;
  }).join("");
}

function plot([title, unit, series]) {
  const values = points.flatMap((point) => series.map(([key]) => point[key])).filter((value) => value !== null);
  const most = Math.max(1e-9, ...values);
  const latest = points.at(-1);
  const now = (key) => latest && latest[key] !== null ? `${short(latest[key])}${unit}` : "–";
  const figure = make("figure", {},
    make("figcaption", {}, make("strong", { textContent: title }),
      ...series.map(([key, name], i) => make("span", { className: `key c${i}`, textContent: `${name} ${now(key)}` }))));
  const { firstChild: svg } = make("div", {
    innerHTML: `<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img"></svg>`,
  });
  const peak = values.length ? `highest ${short(most)}${unit}` : "nothing yet";
  svg.setAttribute("aria-label", `${title}, last hour: now ${series.map(([key, name]) => `${name} ${now(key)}`).join(", ")}; ${peak}`);
  series.forEach(([key], i) => {
    const line = document.createElementNS(svg.namespaceURI, "path");
    line.setAttribute("class", `c${i}`);
    line.setAttribute("d", path(key, most));
    svg.append(line);
  });
  figure.append(svg, make("div", { className: "ends quiet", ariaHidden: "true" },
    make("span", { textContent: `${spell(POINTS * step_s)} ago` }), make("span", { textContent: peak }),
    make("span", { textContent: "now" })));
  return figure;
}

const showHour = () => byId("plots").replaceChildren(...PLOTS.map(plot));

// The device

function showMachine({ mqtt, update, clock, device, compiling, event_loop: loop, reboot_wanted: reboot }) {
  const temperatures = Object.entries(device?.temperatures_celsius ?? {})
    .map(([zone, degrees]) => `${zone.replace(/-thermal$/, "")} ${degrees.toFixed(0)} °C`);
  const slowed = device?.throttled;
  const pairs = {
    "MQTT": !mqtt ? "no broker is configured" : `${mqtt.broker}, ${mqtt.connected ? "connected" : `down: ${mqtt.reason}`}`,
    "upstream": update && `${update.url}, ${update.problem ?? (update.looked_s_ago === null ? "not asked yet"
      : `asked ${spell(update.looked_s_ago)} ago`)}`,
    "clock": clock?.synced ? (clock.assumed ? "taken for synchronised" : "synchronised")
      : "not synchronised; no update is installed until it is, or clock.assume_synced is set",
    "temperature": temperatures.join(", "),
    "board": device?.model,
    "power mode": device?.power_mode?.name ?? device?.power_mode?.id,
    "throttling": slowed?.reasons.length ? `${slowed.reasons.join(", ")} for ${spell(slowed.for_s)}`
      : device?.slowed_by || device?.power_events ? "none" : null,
    "GPU load": device?.gpu_load === undefined ? null : `${Math.round(device.gpu_load * 100)} %`,
    "event loop": loop && `late by ${short(loop.lag_p99_ms)} ms (99 %)`,
    "compiling": compiling && `engines of ${compiling.bundle}${compiling.says ? `: ${compiling.says}` : ""}`,
    "reboot": reboot && `wanted: ${reboot}`,
  };
  draw("machine", pairs, facts);
}

// Updates

let looked = "";
async function showUpdate(update) {
  byId("update").hidden = !update;
  if (!update) return;
  const latest = update.latest;
  say("update-state", (update.problem ?? (update.deployment
    ? `${latest.name} ${latest.version} is at step ${update.step}`
      + (update.share ? ` (${Math.round(update.share * 100)} %)` : "")
      + (update.fetched_bytes ? `, ${bytes(update.fetched_bytes)} fetched` : "")
    : update.looking ? `looking at channel ${update.channel}` : `channel ${update.channel}: nothing is under way`))
    + (update.paused ? "; paused, until the order resume" : ""));
  const key = JSON.stringify([latest, update.step]);
  if (!latest || key === looked) return;
  looked = key;
  try {
    const [deployment] = (await ask("v1/deployments")).deployments;
    draw("gates", deployment, () => [
      ...deployment.verdicts.map(({ step, event, reason, figures }) => make("li", {},
        make("span", { className: event === "passed" ? "good" : "bad", textContent: `${step} ${event}` }),
        Object.entries(figures).map(([name, value]) =>
          ` · ${name.replace(/_bytes$/, "").replaceAll("_", " ")} ${name.endsWith("_bytes") ? bytes(value) : short(value)}`).join(""),
        reason ? `: ${reason}` : "")),
      make("li", { textContent: deployment.ended
        ? `${deployment.name} ${deployment.version}: ${deployment.step}${deployment.reason ? `, ${deployment.reason}` : ""}`
        : `${deployment.step} is under way` }),
    ]);
  } catch {
    looked = ""; // it is asked again with the next status
  }
}

// Faults

function showFaults(faults) {
  const told = faults.map((fault) => ({ ...fault, ago: spell(Math.max(0, fault.ago_s)) }));
  draw("faults", told.map(({ ago, model, cause, reason, recovery_s: spent }) => [ago, model, cause, reason, spent]),
    (rows) => rows.length ? rows.map(([ago, model, cause, reason, spent]) => make("li", {},
      make("strong", { textContent: `${model}: ${cause}` }), ` ${ago} ago, `,
      make("span", { className: spent === null ? "bad" : "good",
        textContent: spent === null ? "not recovered yet" : `recovered in ${short(spent)} s` }),
      make("div", { className: "quiet", textContent: reason ?? "" })))
      : [make("li", { textContent: "None since the start." })]);
}

// All of it

function offer(models) {
  const names = models.filter((model) => model.takes_pictures).map((model) => model.name);
  byId("try").hidden = !names.length;
  draw("model", names, () => names.map((name) => make("option", { textContent: name, value: name })));
}

function show(status) {
  document.body.className = "";
  byId("summary").className = status.ready ? "good" : "bad";
  say("device", status.device_id);
  const unready = status.models.filter((model) => !model.ready).map((model) => model.name);
  say("summary", status.ready ? "Ready" : `Not ready: ${unready.join(", ")}`);
  say("since", `up ${spell(status.uptime_s)}, version ${status.appliance}`);
  showModels(status);
  showMemory(status);
  showMachine(status);
  showUpdate(status.update);
  showFaults(status.recent_faults ?? []);
  offer(status.models);
}

let heardAt = Date.now();
let source = null;

function listen() {
  source = new EventSource("v1/events");
  heardAt = Date.now();
  const hear = (name, take) => source.addEventListener(name, (event) => {
    heardAt = Date.now();
    take(JSON.parse(event.data));
  });
  hear("history", (history) => {
    ({ points, step_s } = history);
    showHour();
  });
  hear("point", (point) => {
    points = [...points, point].slice(-POINTS);
    showHour();
  });
  hear("status", show);
  source.onerror = lost;
}

/** Say why nothing comes, as far as the daemon can be asked, and try again. */
async function lost() {
  source.close();
  source = null;
  let why = "";
  try {
    show(await ask("v1/status", { signal: AbortSignal.timeout(SILENCE_MS) }));
  } catch (error) {
    why = error.message;
  }
  if (why) {
    document.body.className = "stale";
    byId("summary").className = "bad";
    say("summary", `The daemon does not answer (${why}); what follows is from before.`);
  }
  setTimeout(listen, RETRY_MS);
}

// A device that was switched off says no goodbye.
setInterval(() => source && Date.now() - heardAt > SILENCE_MS && lost(), 1000);

// A picture

let last = null;

async function paint() {
  const { picture, lines, reading } = last;
  const canvas = byId("canvas");
  // Boxes are pixels of the picture as it was sent, its EXIF orientation not applied.
  const bitmap = await createImageBitmap(picture, { imageOrientation: "none" });
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const pen = canvas.getContext("2d");
  pen.drawImage(bitmap, 0, 0);
  const size = Math.max(bitmap.width / 70, 9);
  lines.forEach(({ box, text }, i) => {
    if (!box) return;
    const trace = () => {
      pen.beginPath();
      box.forEach(([x, y]) => pen.lineTo(x, y));
      pen.closePath();
    };
    trace();
    if (byId("overlay").checked && reading) {
      const [[x0, y0], [x1, y1], , [x3, y3]] = box;
      const [across, down] = [Math.hypot(x1 - x0, y1 - y0), Math.hypot(x3 - x0, y3 - y0)];
      pen.fillStyle = "#ffffffe8";
      pen.fill();
      pen.save();
      pen.translate(x0, y0);
      pen.rotate(Math.atan2(y1 - y0, x1 - x0));
      pen.font = `${down * .72}px system-ui, sans-serif`;
      pen.fillStyle = "#111";
      pen.fillText(text, 2, down * .78, Math.max(across - 4, 1));
      pen.restore();
    }
    pen.lineWidth = Math.max(bitmap.width / 600, 1);
    pen.strokeStyle = "#c2136f";
    trace();
    pen.stroke();
    pen.font = `bold ${size}px system-ui, sans-serif`;
    const width = pen.measureText(i + 1).width + 4;
    const [x, y] = [Math.max(box[0][0] - width, 0), box[0][1]];
    pen.fillStyle = "#c2136f";
    pen.fillRect(x, y, width, size * 1.15);
    pen.fillStyle = "#fff";
    pen.fillText(i + 1, x + 2, y + size * .95);
  });
  canvas.hidden = false;
}

async function read(picture) {
  const outcome = byId("outcome");
  outcome.className = "";
  outcome.textContent = `Reading ${picture.name} ...`;
  byId("canvas").hidden = true;
  byId("lines").replaceChildren();
  byId("picture").disabled = true;
  try {
    const answer = await ask(`v1/models/${encodeURIComponent(byId("model").value)}/predict`, { method: "POST", body: picture });
    const kind = answer.objects ? "object" : answer.classes ? "class" : "line of text";
    // Classes have no box and no text of their own.
    const lines = (answer.lines ?? answer.objects ?? answer.classes ?? [])
      .map((found) => ({ ...found, text: found.text ?? found.label }));
    outcome.textContent = `${lines.length || "No"} ${kind.replace(/^\w+/, (word) => plural(word, lines.length))} in ${picture.name}; `
      + `${answer.model} ${answer.version} by ${answer.runtime} (${answer.precision}) `
      + `in ${Math.round(answer.timing_ms.total)} ms, ${answer.trust}`;
    byId("lines").replaceChildren(...lines.map(({ text, confidence }) =>
      make("li", { textContent: `${text} (${confidence.toFixed(2)})` })));
    last = { picture, lines, reading: Boolean(answer.lines) };
    await paint();
  } catch (error) {
    outcome.className = "bad";
    outcome.textContent = `${picture.name}: ${error.message}`;
  } finally {
    byId("picture").disabled = false;
  }
}

byId("picture").addEventListener("change", (event) => {
  const [picture] = event.target.files;
  if (picture) read(picture);
});
// So that choosing the same file again is a change, too.
byId("picture").addEventListener("click", (event) => { event.target.value = ""; });
byId("overlay").addEventListener("change", () => last && paint());

// A picture that misses the box by a little must not replace the page.
for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => event.preventDefault());
byId("drop").addEventListener("dragover", () => byId("drop").classList.add("over"));
for (const kind of ["dragleave", "drop"]) byId("drop").addEventListener(kind, () => byId("drop").classList.remove("over"));
byId("try").addEventListener("drop", (event) => {
  const [picture] = event.dataTransfer.files;
  if (picture) read(picture);
});

showHour();
listen();
