"use strict";

const PAGE = 500;
const MOST = 2000;
const SHOWN = 200;
const EVERY_MS = 10_000;
const LEAST_MS = 1000;
/** Of the campaigns, the newest first: so many in full, and so many in all. */
const [WHOLE, CAMPAIGNS] = [3, 20];

let devices = [];

const ago = (at) => `${spell(Math.max(0, Date.now() / 1000 - at))} ago`;
const moment = (at) => new Date(at * 1000).toLocaleString();
const pairs = (labels) => Object.entries(labels).map(([key, value]) => `${key}=${value}`);

/** The fleet page by page, as far as one screen can make use of it; and whether there are more. */
async function readDevices() {
  const found = [];
  let after = "";
  do {
    const page = await ask(`v1/fleet/devices?limit=${PAGE}${after ? `&after=${encodeURIComponent(after)}` : ""}`);
    found.push(...page.devices);
    after = page.next;
  } while (after && found.length < MOST);
  return [found, Boolean(after)];
}

/** A bar of shares with its legend: [what, count, class]. */
function bar(parts) {
  const there = parts.filter(([, count]) => count > 0);
  return [
    make("div", { className: "bar", role: "img", ariaLabel: there.map(([name, count]) => `${name} ${count}`).join(", ") },
      ...there.map(([, count, kind]) => {
        const piece = make("span", { className: kind });
        piece.style.flex = `${count} 1 0`;
        return piece;
      })),
    make("ul", { className: "legend" }, ...there.map(([name, count, kind]) =>
      make("li", { className: kind, textContent: `${name} ${count}` }))),
  ];
}

// Campaigns

const KINDS = { running: "", done: "good", paused: "warn", stopped: "bad", aborted: "warn" };

function who(wave) {
  const what = wave.group ? `group ${wave.group}` : wave.label ? wave.label : `${wave.percent} %`;
  return wave.canary ? `${what} (canary)` : what;
}

function waveOf(campaign, wave, counts, number) {
  const begun = number <= campaign.wave;
  return make("div", { className: "wave" },
    make("strong", { textContent: `${number}. ${who(wave)}` }), begun ? "" : " not begun",
    ...(begun && counts.wanted ? bar([
      ["committed", counts.committed, "is-good"], ["rolled back", counts.rolled_back, "is-bad"],
      ["stuck", counts.stuck, "is-warn"], ["waiting", counts.waiting, "free"],
    ]) : begun ? [" no devices"] : []));
}

function showCampaigns(campaigns) {
  const latest = campaigns.slice(0, CAMPAIGNS);
  draw("campaigns", latest, () => latest.length ? latest.map((campaign, place) => {
    const whole = place < WHOLE || campaign.state === "running" || campaign.state === "paused";
    const item = make("li", {},
      make("h3", {}, `${campaign.name} `, make("span", { className: KINDS[campaign.state], textContent: `● ${campaign.state}` })),
      campaign.reason ? make("p", { className: KINDS[campaign.state], textContent: campaign.reason }) : null,
      ...(whole ? campaign.waves.map((wave, i) => waveOf(campaign, wave, campaign.counts[i], i + 1)) : []));
    item.dataset.state = campaign.state;
    return item;
  }) : [make("li", { textContent: "None yet: appliance fleet campaign start begins one." })]);
}

// Versions

function showVersions() {
  const models = Object.create(null); // names come from devices
  for (const one of devices) {
    for (const [model, { version }] of Object.entries(one.versions)) {
      models[model] ??= {};
      models[model][version] = (models[model][version] ?? 0) + 1;
    }
  }
  draw("versions", models, () => Object.keys(models).length ? Object.entries(models).sort().flatMap(([model, versions]) => [
    make("h3", { textContent: model }),
    ...bar(Object.entries(versions).sort(([one], [other]) => one.localeCompare(other, "en", { numeric: true }))
      .map(([version, count], i) => [version, count, `c${i % 4}`])),
  ]) : [make("p", { textContent: "No device has told what it runs." })]);
}

// Devices

function healthOf(one) {
  if (!one.online) return ["away", "quiet"];
  if (one.degraded) return [`on a fallback: ${one.degraded}`, "warn"];
  return [one.health || "–", one.health === "ready" ? "good" : one.health ? "bad" : "quiet"];
}

const runs = (one) => Object.entries(one.versions).map(([model, { version }]) => `${model} ${version}`).join(", ");
const wants = (one) => Object.entries(one.desired).map(([model, version]) => `${model} ${version}`).join(", ");
const words = (one) => [one.device_id, runs(one), wants(one), healthOf(one)[0], one.profile ?? "", ...one.groups,
  ...pairs(one.labels)].join(" ").toLowerCase();

function showDevices() {
  const sought = byId("find").value.toLowerCase().split(/\s+/);
  const found = devices.filter((one) => {
    const text = words(one);
    return sought.every((word) => text.includes(word));
  });
  const shown = found.slice(0, SHOWN);
  say("found", found.length > shown.length ? `the first ${shown.length} of ${found.length}` : `${found.length} of ${devices.length}`);
  const rows = shown.map((one) => [one.device_id, one.online ? "online" : ago(one.last_seen), ...healthOf(one),
    runs(one) || "–", wants(one), [...one.groups, ...pairs(one.labels)].join(", ")]);
  draw("devices", rows, () => rows.map(([name, seen, health, kind, running, wanted, marks]) => make("tr", {},
    make("th", { scope: "row" }, make("a", { href: `#${encodeURIComponent(name)}`, textContent: name })),
    make("td", { textContent: seen }), make("td", { className: kind, textContent: health }),
    make("td", { textContent: running }), make("td", { textContent: wanted || "its channel" }),
    make("td", { textContent: marks }))));
}

// One device

/** What the audit log says begins with its kind, which is shown before it. */
const bare = (text, kind) => text.startsWith(kind) ? text.slice(kind.length).trim() : text;
const chosen = () => decodeURIComponent(location.hash.slice(1));

async function showOne() {
  const name = chosen();
  byId("one").hidden = !name;
  if (!name) return;
  say("one-title", name);
  try {
    const one = await ask(`v1/fleet/devices/${encodeURIComponent(name)}`);
    if (name !== chosen()) return;
    draw("facts", [one.last_seen, one.online, one.versions, one.desired, one.degraded, one.health, one.groups, one.labels], () => facts({
      "seen": one.online ? "online" : one.last_seen ? moment(one.last_seen) : "never",
      "health": healthOf(one)[0],
      "runs": runs(one),
      "should run": wants(one) || "what its channel holds",
      "profile": one.profile,
      "groups": one.groups.join(", "),
      "labels": pairs(one.labels).join(", "),
    }));
    draw("timeline", one.timeline, () => one.timeline.map(({ at, kind, text, payload }) => make("li", {},
      make("time", { className: "quiet", dateTime: new Date(at * 1000).toISOString(), textContent: moment(at) }),
      " ", make("strong", { textContent: kind.replaceAll("_", " ") }), ` ${bare(text, kind)}`,
      payload && Object.keys(payload).length ? make("details", {}, make("summary", { textContent: "all of it" }),
        make("pre", { textContent: JSON.stringify(payload, null, 1) })) : null)));
  } catch (error) {
    draw("facts", error.message, () => facts({ "not known": error.message }));
    draw("timeline", [], () => []);
  }
}

// All of it

function summary(campaigns, more) {
  const online = devices.filter((one) => one.online).length;
  const ill = devices.filter((one) => one.online && (one.degraded || (one.health && one.health !== "ready"))).length;
  const going = campaigns.filter((one) => one.state === "running").length;
  say("summary", `${more ? "The first " : ""}${devices.length} ${plural("device", devices.length)}, ${online} online`
    + (ill ? `, ${ill} not well` : "") + (going ? `; ${going} ${plural("campaign", going)} running` : ""));
  byId("summary").className = ill || online < devices.length ? "warn" : "good";
}

async function refresh() {
  try {
    const [[found, more], { campaigns }] = await Promise.all([readDevices(), ask("v1/fleet/campaigns")]);
    devices = found;
    document.body.className = "";
    summary(campaigns, more);
    say("since", `as of ${new Date().toLocaleTimeString()}`);
    showCampaigns(campaigns);
    showVersions();
    showDevices();
    await showOne();
  } catch (error) {
    document.body.className = "stale";
    byId("summary").className = "bad";
    say("summary", `The upstream does not answer (${error.message}); what follows is from before.`);
  }
}

/** One refresh at a time, and not more often than once a second, however much changes. */
let busy = false;
let again = false;
async function look() {
  again = true;
  if (busy) return;
  busy = true;
  while (again) {
    again = false;
    await refresh();
    await new Promise((done) => { setTimeout(done, LEAST_MS); });
  }
  busy = false;
}

byId("find").addEventListener("input", showDevices);
addEventListener("hashchange", async () => {
  await showOne();
  if (chosen()) byId("one").scrollIntoView({ behavior: "smooth" });
});
// It connects again by itself; what it missed meanwhile the next regular look brings.
new EventSource("v1/fleet/events").onmessage = look;
setInterval(look, EVERY_MS);
look();
