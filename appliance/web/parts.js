"use strict"; // What the pages share; it comes before the script of a page.

const byId = (id) => document.getElementById(id);

function make(tag, more, ...children) {
  const made = Object.assign(document.createElement(tag), more);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Write only what has changed: a screen reader says again what is written again, and a selection would be lost. */
const drawn = new Map();
function draw(id, data, render) {
  const key = JSON.stringify(data);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  byId(id).replaceChildren(...render(data));
}
const say = (id, text) => draw(id, text, (said) => [said]);

function bytes(count) {
  if (count >= 2 ** 30) return `${(count / 2 ** 30).toFixed(1)} GiB`;
  return count >= 2 ** 20 || !count ? `${Math.round(count / 2 ** 20)} MiB` : `${Math.ceil(count / 1024)} KiB`;
}

function spell(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 360000 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

function short(value) {
  const digits = Number.isInteger(value) || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

const plural = (word, count) => (count === 1 ? word : word.endsWith("s") ? `${word}es` : `${word}s`);

/** Terms and descriptions; what is null or undefined is not known here, and left out. */
function facts(pairs) {
  return Object.entries(pairs).filter(([, what]) => what !== null && what !== undefined && what !== "")
    .flatMap(([term, what]) => [make("dt", { textContent: term }),
      what instanceof Node ? make("dd", {}, what) : make("dd", { textContent: what })]);
}

async function ask(path, options = {}) {
  const response = await fetch(path, options);
  const answer = await response.json().catch(() => ({ error: `the answer cannot be read (HTTP ${response.status})` }));
  if (!response.ok) throw new Error(answer.error ?? `HTTP ${response.status}`);
  return answer;
}
