
"use strict";
// Draws the timeline and lists the storages, of what offplan.report.embed has; see there for the
// columns.  Nothing here decides anything: bytes are added up as offplan.chart does.
(() => {
const at = (id) => document.getElementById(id);
const found = JSON.parse(at("embedded").textContent);
const { strings, sizes, panels: given, parts, keys, rules } = found;
document.documentElement.classList.add("scripted");

// --- words ---------------------------------------------------------------------------------------

// As offplan.units.format_size.
function size(bytes) {
  if (bytes < 0) return "-" + size(-bytes);
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (bytes * 200000 >= scale * 199999) return (bytes / scale).toFixed(2) + " " + unit;
  return bytes + " B";
}
const count = (number) => number.toLocaleString("en-US");
const ms = (nanoseconds) => {
  const value = nanoseconds / 1e6;
  return value.toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: value < 10 ? 3 : 1 }) + " ms";
};
function made(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

// --- what is held when ---------------------------------------------------------------------------

function summed(steps, first) {
  const sums = new Float64Array(steps.length + 1);
  sums[0] = first;
  for (let i = 0; i < steps.length; i++) sums[i + 1] = sums[i] + steps[i];
  return sums;
}

function opened(panel) {
  const starts = summed(panel.starts, 0);
  const ops = summed(panel.moments, 0).subarray(1);
  const moments = ops.length;
  const stacked = parts.map((_, part) => new Float64Array(moments + 1).fill(0, 1));
  const [bytes, first, length, part, maker, leaves, row] = panel.spans;
  panel.resting.forEach((resting, place) => { stacked[place][0] += resting; });
  const flight = keys.indexOf("in_flight");
  for (let i = 0; i < bytes.length; i++) {
    const end = first[i] + length[i] + 1, gone = leaves[i] < 0 ? end : first[i] + leaves[i];
    stacked[part[i]][first[i]] += sizes[bytes[i]];
    stacked[part[i]][gone] -= sizes[bytes[i]];
    stacked[flight][gone] += sizes[bytes[i]];
    stacked[flight][end] -= sizes[bytes[i]];
  }
  for (const changes of stacked) for (let m = 1; m <= moments; m++) changes[m] += changes[m - 1];
  const workspace = stacked[keys.indexOf("workspace")];
  panel.temporary[0].forEach((moment, i) => { workspace[moment] += sizes[panel.temporary[1][i]]; });
  const totals = new Float64Array(moments);
  for (const held of stacked) for (let m = 0; m < moments; m++) totals[m] += held[m];
  // The peak is where the plan says that it is: as much can be held elsewhere.
  let top = Math.max(0, ops.indexOf(panel.at));
  for (let m = top; m < moments && ops[m] === panel.at; m++) if (totals[m] > totals[top]) top = m;
  const time = new Float64Array(moments + 1), index = new Float64Array(moments + 1);
  for (let m = 0; m < moments; m++) { time[m] = starts[ops[m]]; index[m] = ops[m]; }
  time[moments] = starts[starts.length - 1];
  index[moments] = starts.length - 1;
  return { ...panel, starts, ops, stacked, totals, top, edges: { time, op: index }, count: moments,
    spans: { bytes, first, length, part, maker, leaves, row } , names: panel.ops };
}

function after(sorted, value) {  // how many are at most value
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] <= value) low = middle + 1; else high = middle; }
  return low;
}
function before(sorted, value) {  // how many are less than value
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low;
}

const opWords = (panel, op) => {
  const [name, target, module, source] = panel.names.map((column) => strings[column[op]]);
  return { name, target, module, source };
};

// --- the timeline --------------------------------------------------------------------------------

const timeline = (() => {
  if (!given.length) return null;
  const panels = given.map(opened);
  const chart = at("chart"), drawing = at("drawing"), overlay = at("overlay"), tip = at("tip");
  const timed = panels.every((panel) => panel.times);
  let axis = timed ? "time" : "op";
  const ends = (kind) => Math.max(...panels.map((panel) => panel.edges[kind][panel.count]));
  let view = { from: 0, to: ends(axis) };
  let cursor = null, pinned = null, marked = null, shape = null, colours = null;
  const shown = parts.map((_, part) => part).filter((part) => panels.some((panel) => panel.stacked[part].some((held) => held > 0)));
  const highest = Math.max(found.budget || 0, ...panels.map((panel) => panel.totals.reduce((most, held) => Math.max(most, held), panel.peak)));
  const hasCopies = panels.some((panel) => panel.copies[0].length);
  const hasWaits = panels.some((panel) => panel.waits[0].length);
  const lanes = hasCopies ? ["to host", "to device", ...(hasWaits ? ["waiting"] : [])] : [];

  function laidOut() {
    const width = chart.clientWidth, narrow = width < 560;
    const left = narrow ? 66 : 76, right = 10, high = narrow ? 170 : Math.min(280, Math.max(200, width / 5));
    const tops = panels.map((_, place) => 26 + place * (high + 34));
    const lanesTop = tops[tops.length - 1] + high + 8;
    const bottom = lanesTop + lanes.length * 22;
    return { width, left, right, high, tops, lanesTop, bottom, height: bottom + 38, plot: width - left - right, narrow };
  }
  const toX = (value) => shape.left + (value - view.from) / (view.to - view.from) * shape.plot;
  const fromX = (x) => view.from + (x - shape.left) / shape.plot * (view.to - view.from);
  const scale = niceStep(highest, 4);
  const ceiling = Math.ceil(highest * 1.04 / scale) * scale;
  const toY = (place, bytes) => shape.tops[place] + shape.high * (1 - bytes / ceiling);

  function niceStep(range, ticks) {
    const rough = range / ticks || 1, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= rough);
  }
  // Where nanoseconds are on the axis that is shown: between ops in proportion.
  function placed(panel, nanoseconds) {
    if (axis === "time" || !panel.times) return nanoseconds;
    const op = Math.min(after(panel.starts, nanoseconds) - 1, panel.starts.length - 2);
    const length = panel.starts[op + 1] - panel.starts[op];
    return op + (length ? Math.min(1, (nanoseconds - panel.starts[op]) / length) : 0);
  }
  // The moment at which the most is held, of those from one value of the axis to another.
  function momentIn(panel, from, to) {
    const edges = panel.edges[axis];
    if (from >= edges[panel.count]) return -1;
    const first = Math.max(0, Math.min(after(edges, from) - 1, panel.count - 1));
    const last = Math.max(first, Math.min(before(edges, to) - 1, panel.count - 1));
    let most = first;
    for (let m = first + 1; m <= last; m++) if (panel.totals[m] > panel.totals[most]) most = m;
    return most;
  }

  function sized(canvas) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(shape.width * ratio);
    canvas.height = Math.round(shape.height * ratio);
    canvas.style.height = shape.height + "px";
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px " + getComputedStyle(document.body).fontFamily;
    return pen;
  }

  function draw() {
    shape = laidOut();
    if (shape.width <= 0) return;
    colours = { parts: keys.map(colour) };
    for (const name of ["back", "text", "soft", "line", "strong", "warn", "accent", "in_flight", "reloaded", "gradients"]) colours[name] = colour(name);
    const pen = sized(drawing);
    pen.fillStyle = colours.back;
    pen.fillRect(0, 0, shape.width, shape.height);
    panels.forEach((panel, place) => { grid(pen, place); stack(pen, panel, place); });
    axisBelow(pen);
    panels.forEach((panel, place) => rules_(pen, panel, place));
    if (lanes.length) drawLanes(pen);
    point();
  }

  function grid(pen, place) {
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let bytes = 0; bytes <= ceiling * 1.0001; bytes += scale) {
      const y = Math.round(toY(place, bytes)) + 0.5;
      pen.fillStyle = colours.soft;
      pen.fillText(tick(bytes), shape.left - 7, y);
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(shape.left, y); pen.lineTo(shape.left + shape.plot, y); pen.stroke();
    }
  }
  const tick = (bytes) => bytes ? size(bytes).replace(/\.?0+ /, " ") : "0";

  function stack(pen, panel, place) {
    const ratio = window.devicePixelRatio || 1, step = 1 / ratio;
    const columns = Math.round(shape.plot * ratio);
    let start = 0, moment = null;
    const width = (view.to - view.from) / columns;
    for (let column = 0; column <= columns; column++) {
      const next = column < columns ? momentIn(panel, view.from + column * width, view.from + (column + 1) * width) : null;
      if (next === moment && column < columns) continue;
      if (moment !== null && moment >= 0) bar(pen, panel, place, moment, shape.left + start * step, (column - start) * step);
      start = column;
      moment = next;
    }
  }

  // Bands of one moment, with a hairline of the background between any two.
  function bar(pen, panel, place, moment, x, width) {
    let held = 0;
    const bottom = toY(place, 0);
    let y = bottom;
    for (const part of shown) {
      const bytes = panel.stacked[part][moment];
      if (bytes <= 0) continue;
      held += bytes;
      const top = toY(place, held);
      pen.fillStyle = colours.parts[part];
      pen.fillRect(x, top, width, y - top);
      if (y < bottom && y - top > 2.5) {
        pen.fillStyle = colours.back;
        pen.fillRect(x, y - 0.8, width, 0.8);
      }
      y = top;
    }
  }

  function label(pen, text, x, y, ink, align = "left") {
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    const width = pen.measureText(text).width;
    const left = Math.max(shape.left + 2, Math.min(align === "right" ? x - width : align === "center" ? x - width / 2 : x, shape.left + shape.plot - width - 6));
    pen.fillStyle = colours.back;
    pen.globalAlpha = 0.88;
    pen.fillRect(left - 3, y - 8, width + 6, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = ink;
    pen.fillText(text, left, y);
  }

  // Peak, budget and floor, each with its name, and where the backward begins.
  function rules_(pen, panel, place) {
    const right = shape.left + shape.plot;
    pen.save();
    pen.beginPath(); pen.rect(shape.left, shape.tops[place] - 26, shape.plot, shape.high + 26); pen.clip();
    const turn = axis === "time" ? panel.starts[panel.forward] : panel.forward;
    vertical(pen, place, toX(turn));
    across(pen, place, found.floor, colours.strong, [2, 3]);
    if (found.budget) across(pen, place, found.budget, colours.warn, [7, 4]);
    across(pen, place, panel.peak, colours.text, []);
    pen.restore();
    pen.font = "600 13px " + getComputedStyle(document.body).fontFamily;
    pen.textAlign = "left"; pen.textBaseline = "middle"; pen.fillStyle = colours.text;
    pen.fillText(panel.name, shape.left, shape.tops[place] - 15);
    pen.font = pen.font.replace("600 13px", "12px");
    // Labels stand away from each other: the peak's above its line, the others below theirs.
    const x = toX(panel.edges[axis][panel.top]);
    label(pen, "peak " + size(panel.peak), Math.max(shape.left, x), toY(place, panel.peak) - 10, colours.text, "center");
    mark(pen, place, panel, x);
    const below = (bytes, text, ink) => label(pen, text, right - 4, Math.min(toY(place, bytes) + 10, shape.tops[place] + shape.high - 9), ink, "right");
    if (found.budget) below(found.budget, "budget " + size(found.budget), colours.warn);
    const gap = found.budget ? toY(place, found.floor) - toY(place, found.budget) : 99;
    if (gap > 18 || gap < 0) below(found.floor, "floor " + size(found.floor), colours.soft);
  }
  function across(pen, place, bytes, ink, dashes) {
    const y = Math.round(toY(place, bytes)) + 0.5;
    for (const [style, width] of [[colours.back, 3.5], [ink, 1.5]]) {
      pen.setLineDash(style === colours.back ? [] : dashes);
      pen.strokeStyle = style; pen.lineWidth = width;
      pen.globalAlpha = style === colours.back ? 0.75 : 1;
      pen.beginPath(); pen.moveTo(shape.left, y); pen.lineTo(shape.left + shape.plot, y); pen.stroke();
    }
    pen.setLineDash([]); pen.globalAlpha = 1;
  }
  function vertical(pen, place, x) {
    pen.strokeStyle = colours.strong; pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(Math.round(x) + 0.5, shape.tops[place]); pen.lineTo(Math.round(x) + 0.5, shape.tops[place] + shape.high); pen.stroke();
    pen.fillStyle = colours.soft; pen.textBaseline = "middle";
    const y = shape.tops[place] - 15;
    // Not over the panel's name, nor past the end.
    if (x - shape.left < 130 || x > shape.left + shape.plot - 75) return;
    pen.textAlign = "right"; pen.fillText("forward", x - 7, y);
    pen.textAlign = "left"; pen.fillText("backward", x + 7, y);
  }
  function mark(pen, place, panel, x) {
    if (x < shape.left || x > shape.left + shape.plot) return;
    const y = toY(place, panel.peak);
    pen.fillStyle = colours.text; pen.strokeStyle = colours.back; pen.lineWidth = 1.5;
    pen.beginPath(); pen.arc(x, y, 4.5, 0, 7); pen.fill(); pen.stroke();
  }

  function axisBelow(pen) {
    const step = niceStep(axis === "time" ? (view.to - view.from) / 1e6 : view.to - view.from, shape.narrow ? 3 : 8) * (axis === "time" ? 1e6 : 1);
    const y = shape.bottom + 4;
    pen.textBaseline = "top";
    pen.textAlign = "center";
    for (let value = Math.ceil(view.from / step) * step; value <= view.to; value += step) {
      const x = Math.round(toX(value)) + 0.5;
      pen.strokeStyle = colours.strong;
      pen.beginPath(); pen.moveTo(x, y - 4); pen.lineTo(x, y); pen.stroke();
      pen.fillStyle = colours.soft;
      const text = axis === "time" ? (value / 1e6).toLocaleString("en-US", { maximumFractionDigits: 4 }) : count(Math.round(value));
      pen.fillText(text, Math.min(x, shape.left + shape.plot - 14), y + 3);
    }
    pen.textAlign = "right";
    pen.fillText(axis === "time" ? "ms" : "op", shape.left - 7, y + 3);
  }

  function drawLanes(pen) {
    const panel = panels[panels.length - 1];
    lanes.forEach((name, lane) => {
      const y = shape.lanesTop + lane * 22;
      pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
      pen.fillText(name, shape.left - 7, y + 9);
      pen.strokeStyle = colours.line; pen.lineWidth = 1;
      pen.strokeRect(shape.left + 0.5, y + 0.5, shape.plot - 1, 17);
    });
    const [begin, length, way] = panel.copies, minimum = 1 / (window.devicePixelRatio || 1);
    for (let i = 0; i < begin.length; i++)
      block(pen, placed(panel, begin[i]), placed(panel, begin[i] + length[i]), way[i], way[i] ? colours.reloaded : colours.in_flight, minimum);
    panel.waits[0].forEach((end, i) => block(pen, placed(panel, end - panel.waits[1][i]), placed(panel, end), 2, colours.gradients, minimum));
  }
  function block(pen, from, to, lane, ink, minimum) {
    if (to < view.from || from > view.to) return;
    const x = Math.max(shape.left, toX(from)), end = Math.min(shape.left + shape.plot, toX(to));
    pen.fillStyle = ink;
    pen.fillRect(x, shape.lanesTop + lane * 22 + 2, Math.max(end - x - (end - x > 4 ? 1 : 0), minimum), 14);
  }

  // --- pointing ---

  // What is under the pointer: a panel with its moment, or a copy.
  function under(x, y) {
    if (x < shape.left || x > shape.left + shape.plot) return null;
    const place = shape.tops.findIndex((top) => y >= top - 4 && y <= top + shape.high);
    const value = fromX(x);
    if (place >= 0) {
      const width = (view.to - view.from) / shape.plot;
      const moment = momentIn(panels[place], value, value + width);
      if (moment < 0) return null;
      return { place, moment, bytes: (1 - (y - shape.tops[place]) / shape.high) * ceiling };
    }
    const lane = Math.floor((y - shape.lanesTop) / 22);
    if (lane < 0 || lane >= lanes.length) return null;
    return inLane(lane, value);
  }
  function inLane(lane, value) {
    const place = panels.length - 1, panel = panels[place], near = 3 * (view.to - view.from) / shape.plot;
    const moment = Math.max(0, momentIn(panel, value, value));
    const [starts, lengths] = lane < 2 ? panel.copies : [panel.waits[0].map((end, i) => end - panel.waits[1][i]), panel.waits[1]];
    let best = -1, distance = near;
    for (let i = 0; i < starts.length; i++) {
      if (lane < 2 && panel.copies[2][i] !== lane) continue;
      const from = placed(panel, starts[i]), to = placed(panel, starts[i] + lengths[i]);
      const off = value < from ? from - value : value > to ? value - to : 0;
      if (off < distance || (off === 0 && distance > 0)) { best = i; distance = off; }
    }
    return { place, moment, bytes: null, lane, copy: best };
  }

  // Spans of a part that are held at a moment, in the order in which they are stacked.
  function heldAt(panel, moment, part) {
    const { spans } = panel, flight = keys.indexOf("in_flight"), list = [];
    for (let i = 0; i < spans.bytes.length; i++) {
      if (spans.first[i] > moment || spans.first[i] + spans.length[i] < moment) continue;
      const gone = spans.leaves[i] >= 0 && spans.first[i] + spans.leaves[i] <= moment;
      if ((gone ? flight : spans.part[i]) === part) list.push(i);
    }
    return list;
  }
  // The part, and the span if one made it, that is drawn where the pointer is.
  function pointed(place, moment, bytes) {
    const panel = panels[place];
    let held = 0;
    for (const part of shown) {
      const own = panel.stacked[part][moment];
      if (own > 0 && bytes !== null && bytes < held + own) return { part, own, ...spanAt(panel, moment, part, bytes - held) };
      held += own;
    }
    return null;
  }
  function spanAt(panel, moment, part, above) {
    let held = panel.resting[part];
    const list = heldAt(panel, moment, part);
    for (const i of list) {
      const own = sizes[panel.spans.bytes[i]];
      if (above >= held && above < held + own) return { span: i, list };
      held += own;
    }
    return { span: -1, list };
  }

  // --- words about it ---

  function line(text, className) { tip.append(made("p", text, className)); }
  const located = (words) => (words.module ? " in " + words.module : "") + (words.source ? " (" + words.source + ")" : "");

  function describe(what) {
    const panel = panels[what.place], op = panel.ops[what.moment], words = opWords(panel, op);
    tip.replaceChildren();
    const phase = op < panel.forward ? "forward" : "backward";
    const when = panel.times ? ms(panel.starts[op]) + ", " : "";
    line(`${panel.name}: ${size(panel.totals[what.moment])}`, "head");
    line(`${when}op ${count(op)} of ${count(panel.names[0].length)}, ${phase}`, "about");
    line(words.target + located(words), "op");
    if (what.lane !== undefined) { describeCopy(panel, what); return; }
    const below = pointed(what.place, what.moment, what.bytes);
    if (below) describePart(panel, below);
    else largest(panel, what.moment);
  }
  function describePart(panel, below) {
    const head = made("p", undefined, "part");
    const swatch = made("span", undefined, "swatch");
    swatch.style.background = colours.parts[below.part];
    head.append(swatch, `${parts[below.part]}: ${size(below.own)}`);
    tip.append(head);
    if (below.span >= 0) describeSpan(panel, below.span);
    else if (panel.resting[below.part] > 0) line(`${size(panel.resting[below.part])} are there all the time`, "about");
    else if (keys[below.part] === "workspace") line("what this op takes and frees again", "about");
  }
  function describeSpan(panel, span) {
    const { spans } = panel, maker = spans.maker[span], row = spans.row[span];
    const stored = row >= 0 ? found.storages[row] : null;
    // A kernel stands for several ops: the plan says which of them made what is saved.
    const words = stored ? storedWords(stored) : maker >= 0 ? opWords(panel, maker) : null;
    const bytes = size(sizes[spans.bytes[span]]);
    if (words) line(`${words.name}, ${bytes}: ${words.target}${located(words)}`, "storage");
    else line(bytes, "storage");
    const first = panel.ops[spans.first[span]], last = panel.ops[spans.first[span] + spans.length[span]];
    const time = panel.times ? ` (${ms(panel.starts[last + 1] - panel.starts[first])})` : "";
    line(`held from op ${count(first)} to ${count(last)}${time}`, "about");
    if (stored) line(decided(stored), "about");
  }
  function largest(panel, moment) {
    const list = [];
    for (const part of shown) for (const i of heldAt(panel, moment, part)) list.push(i);
    list.sort((a, b) => sizes[panel.spans.bytes[b]] - sizes[panel.spans.bytes[a]]);
    if (!list.length) return;
    line(list.length > 1 ? `the largest of ${count(list.length)} storages held:` : "the storage held:", "part");
    for (const i of list.slice(0, 3)) {
      const maker = panel.spans.maker[i], words = maker >= 0 ? opWords(panel, maker) : null;
      line(`${size(sizes[panel.spans.bytes[i]])} ${parts[panel.spans.part[i]]}` + (words ? `: ${words.name}, ${words.target}${located(words)}` : ""), "storage");
    }
  }
  function describeCopy(panel, what) {
    if (what.copy < 0) { line(`nothing is ${what.lane < 2 ? "copied " + lanes[what.lane] : "waited for"} here`, "part"); return; }
    if (what.lane === 2) { line(`compute waits ${ms(panel.waits[1][what.copy])} for copies`, "part"); return; }
    const [begin, length, , bytes, row, issued, awaited] = panel.copies.map((column) => column[what.copy]);
    line(`${lanes[what.lane]}: ${size(sizes[bytes])}` + (panel.times ? `, ${ms(length)} from ${ms(begin)}` : ""), "part");
    if (row >= 0) { const words = storedWords(found.storages[row]); line(`${words.name}: ${words.target}${located(words)}`, "storage"); }
    line(what.lane ? `asked for before op ${count(issued)}, needed by op ${count(awaited)}` : `from the end of op ${count(issued - 1)}, gone after op ${count(awaited - 1)}`, "about");
  }

  function spokenWords() { return [...tip.children].map((child) => child.textContent).join(". "); }

  // --- the cursor ---

  function point() {
    const pen = sized(overlay);
    const what = pinned || cursor;
    legend(what);
    if (marked) lifetime(pen, marked.panel, marked.span);
    if (!what) { tip.hidden = true; return; }
    const panel = panels[what.place], edges = panel.edges[axis];
    const x = toX(what.copy >= 0 && what.x !== undefined ? fromX(what.x) : edges[what.moment]);
    if (x >= shape.left - 1 && x <= shape.left + shape.plot + 1) {
      pen.strokeStyle = colours.text; pen.lineWidth = 1; pen.setLineDash(pinned ? [] : [3, 3]);
      pen.beginPath(); pen.moveTo(Math.round(x) + 0.5, shape.tops[0]); pen.lineTo(Math.round(x) + 0.5, shape.bottom); pen.stroke();
      pen.setLineDash([]);
    }
    const below = what.lane === undefined ? pointed(what.place, what.moment, what.bytes) : null;
    if (below && below.span >= 0) lifetime(pen, panel, below.span);
    describe(what);
    place_(what, x);
  }
  // For how long a storage is held, along the foot of its panel.
  function lifetime(pen, panel, span) {
    const edges = panel.edges[axis], first = panel.spans.first[span];
    const from = Math.max(shape.left, toX(edges[first])), to = Math.min(shape.left + shape.plot, toX(edges[first + panel.spans.length[span] + 1]));
    if (to < shape.left || from > shape.left + shape.plot) return;
    const y = shape.tops[panels.indexOf(panel)] + shape.high;
    pen.fillStyle = colours.back; pen.fillRect(from - 1, y - 6, Math.max(to - from, 2) + 2, 7);
    pen.fillStyle = colours.warn; pen.fillRect(from, y - 5, Math.max(to - from, 2), 5);
  }
  function place_(what, x) {
    tip.hidden = false;
    tip.classList.toggle("pinned", pinned !== null);
    const y = what.y !== undefined ? what.y : shape.tops[what.place] + 20;
    const room = shape.width - tip.offsetWidth - 8;
    const left = x + 16 <= room ? x + 16 : x - tip.offsetWidth - 16;
    tip.style.left = Math.max(4, Math.min(left, room)) + "px";
    tip.style.top = Math.max(0, Math.min(y + 14, shape.height - tip.offsetHeight)) + "px";
  }

  // Bytes of each part where the cursor is, or else at each peak.
  function legend(what) {
    const table = at("legend"), [head, body] = [table.tHead, table.tBodies[0]];
    const moments = panels.map((panel) => {
      if (!what) return panel.top;
      if (panel === panels[what.place]) return what.moment;
      const value = panels[what.place].edges[axis][what.moment];
      return momentIn(panel, value, value);
    });
    table.caption.textContent = what ? (axis === "time" ? "At " + ms(panels[what.place].edges.time[what.moment]) : "At op " + count(panels[what.place].ops[what.moment])) : "At the peaks";
    const row = made("tr");
    row.append(made("th", ""), ...panels.map((panel) => made("th", panel.name, "number")));
    head.replaceChildren(row);
    const cells = (read) => panels.map((panel, i) => made("td", moments[i] < 0 ? "over" : size(read(panel, moments[i])), "number"));
    const lines = [...shown].reverse().map((part) => {
      const each = made("tr"), name = made("th"), swatch = made("span", undefined, "swatch");
      swatch.style.background = colours.parts[part];
      name.append(swatch, parts[part]);
      each.append(name, ...cells((panel, moment) => panel.stacked[part][moment]));
      return each;
    });
    const total = made("tr", undefined, "total");
    total.append(made("th", "together"), ...cells((panel, moment) => panel.totals[moment]));
    body.replaceChildren(...lines, total);
  }

  // --- moving ---

  function show(from, to) {
    const end = ends(axis), length = Math.min(end, Math.max(to - from, end / 1e5));
    const start = Math.max(0, Math.min(from, end - length));
    view = { from: start, to: start + length };
    draw();
  }
  function zoom(factor, around = middle()) {
    show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  }
  function middle() {
    const what = pinned || cursor, half = (view.from + view.to) / 2;
    if (!what) return half;
    const value = panels[what.place].edges[axis][what.moment];
    return value >= view.from && value <= view.to ? value : half;
  }
  function pan(share) { const by = share * (view.to - view.from); show(view.from + by, view.to + by); }
  function goTo(place, moment, speaks = true) {
    pinned = null;
    cursor = { place, moment, bytes: null };
    const value = panels[place].edges[axis][moment];
    const length = view.to - view.from;
    if (value < view.from || value > view.to) view = { from: Math.max(0, value - length / 2), to: Math.max(0, value - length / 2) + length };
    show(view.from, view.to);
    if (speaks) at("spoken").textContent = spokenWords();
  }
  function step(way, isFast) {
    const what = pinned || cursor || { place: panels.length - 1, moment: panels[panels.length - 1].top };
    const panel = panels[what.place], edges = panel.edges[axis];
    // The next moment that is drawn elsewhere: many share a pixel.
    const least = (view.to - view.from) / shape.plot * (isFast ? 40 : 1);
    let moment = what.moment + way;
    while (moment > 0 && moment < panel.count - 1 && Math.abs(edges[moment] - edges[what.moment]) < least) moment += way;
    goTo(what.place, Math.max(0, Math.min(panel.count - 1, moment)));
  }
  function change(way) {
    const what = pinned || cursor || { place: 0, moment: panels[0].top };
    const place = Math.max(0, Math.min(panels.length - 1, what.place + way));
    const value = panels[what.place].edges[axis][what.moment];
    const moment = momentIn(panels[place], value, value);
    goTo(place, moment < 0 ? panels[place].count - 1 : moment);
  }
  function toPeak() {
    const place = (pinned || cursor || { place: panels.length - 1 }).place;
    goTo(place, panels[place].top);
  }
  function pin(what) { pinned = what; point(); at("spoken").textContent = what ? "pinned: " + spokenWords() : ""; }
  function setAxis(kind) {
    if (kind === axis) return;
    axis = kind;
    at("by-time").setAttribute("aria-pressed", String(kind === "time"));
    at("by-op").setAttribute("aria-pressed", String(kind === "op"));
    pinned = cursor = null;
    show(0, ends(axis));
  }

  // --- events ---

  const pressed = { "ArrowLeft": (e) => step(-1, e.shiftKey), "ArrowRight": (e) => step(1, e.shiftKey), "ArrowUp": () => change(-1), "ArrowDown": () => change(1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), "0": () => show(0, ends(axis)), "p": toPeak, "P": toPeak,
    "Home": () => goTo((cursor || { place: 0 }).place, 0), "End": () => { const place = (cursor || { place: 0 }).place; goTo(place, panels[place].count - 1); },
    "PageUp": () => pan(-0.8), "PageDown": () => pan(0.8),
    "Enter": () => pin(pinned ? null : cursor), "Escape": () => { marked = null; cursor = null; pin(null); } };
  chart.addEventListener("keydown", (event) => {
    const act = pressed[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event);
  });

  let drag = null;
  const local = (event) => { const box = chart.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || tip.contains(event.target)) return;
    const [x, y] = local(event);
    drag = { x, y, view, moved: false, selects: event.shiftKey, id: event.pointerId };
  });
  chart.addEventListener("pointermove", (event) => {
    const [x, y] = local(event);
    if (drag && Math.abs(x - drag.x) > 4 && !drag.moved) { drag.moved = true; chart.setPointerCapture(drag.id); }
    if (drag && drag.moved) return drag.selects ? stretch(x) : dragged(x);
    if (tip.contains(event.target)) return;
    const what = under(x, y);
    cursor = what && { ...what, x, y };
    if (!pinned) point();
  });
  function dragged(x) {
    const by = (drag.x - x) / shape.plot * (drag.view.to - drag.view.from);
    show(drag.view.from + by, drag.view.to + by);
  }
  function stretch(x) {
    point();
    const pen = overlay.getContext("2d");
    pen.fillStyle = colours.accent; pen.globalAlpha = 0.25;
    pen.fillRect(Math.min(x, drag.x), shape.tops[0], Math.abs(x - drag.x), shape.bottom - shape.tops[0]);
    pen.globalAlpha = 1;
  }
  chart.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const [x, y] = local(event), was = drag;
    drag = null;
    if (was.moved && was.selects) { const [a, b] = [fromX(was.x), fromX(x)].sort((p, q) => p - q); return show(a, b); }
    if (was.moved) return;
    const what = under(x, y);
    cursor = what && { ...what, x, y };
    pin(pinned && !what ? null : cursor);
  });
  chart.addEventListener("pointercancel", () => { drag = null; });
  chart.addEventListener("pointerleave", () => { if (drag && drag.moved) return; drag = null; cursor = null; if (!pinned) point(); });
  chart.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    // The page scrolls unless the chart has been chosen.
    if (!sideways && !event.ctrlKey && document.activeElement !== chart) return;
    event.preventDefault();
    if (sideways) return pan(event.deltaX / shape.plot);
    zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY / 300))), fromX(local(event)[0]));
  }, { passive: false });

  at("by-time").disabled = !timed;
  at("by-time").setAttribute("aria-pressed", String(timed));
  at("by-op").setAttribute("aria-pressed", String(!timed));
  at("by-time").onclick = () => setAxis("time");
  at("by-op").onclick = () => setAxis("op");
  at("zoom-in").onclick = () => zoom(0.5);
  at("zoom-out").onclick = () => zoom(2);
  at("zoom-all").onclick = () => show(0, ends(axis));
  panels.forEach((panel, place) => {
    const button = made("button", `Peak: ${panel.name}`);
    button.type = "button";
    button.onclick = () => { goTo(place, panel.top); chart.focus(); };
    at("peaks").append(button);
  });
  new ResizeObserver(() => draw()).observe(chart);
  draw();

  // The spans of a storage of the list, one for each panel that has it.
  function spansOf(row) {
    return panels.flatMap((panel) => { const span = panel.spans.row.indexOf(row); return span < 0 || panel.name === "no plan" && panels.length > 1 ? [] : [{ panel, span }]; });
  }
  function reveal(row) {
    const [where] = spansOf(row);
    if (!where) return;
    marked = where;
    goTo(panels.indexOf(where.panel), where.panel.spans.first[where.span]);
    chart.focus({ preventScroll: true });
    chart.scrollIntoView({ block: "center" });
  }
  return { panels, draw, spansOf, reveal, view: () => view, axis: () => axis, shape: () => shape, ceiling };
})();

// --- the storages --------------------------------------------------------------------------------

function storedWords(row) {
  return { name: strings[row[3]], target: strings[row[4]], module: strings[row[5]], source: strings[row[6]] };
}
// What is done with a storage, and why.
function decided(row) {
  const action = strings[row[0]], rule = strings[row[7]], holder = strings[row[8]], reason = strings[row[9]];
  if (action === "recompute") return "computed again" + (reason ? ": " + reason : "");
  const said = { offload: "offloaded", keep: "kept", skipped: "skipped" }[action] || action;
  const why = rule ? ` under ${rule}${holder ? ", held by " + holder : ""}` : reason ? ": " + reason : "";
  return said + why;
}

const list = (() => {
  const region = at("rows"), table = region.querySelector("table"), body = table.tBodies[0];
  const PRINTED = 40;
  const rows = found.storages.map((row, place) => {
    const words = storedWords(row), action = strings[row[0]], why = decided(row);
    return { place, row, bytes: sizes[row[1]], action, ...words, why, text: "" };
  });
  for (const each of rows) each.text = [each.name, each.target, each.module, each.source, each.action, each.why].join("\n").toLowerCase();
  const columns = [
    { key: "bytes", title: "Size", width: 104, numeric: true }, { key: "action", title: "Action", width: 92 },
    { key: "name", title: "Storage", width: 170 }, { key: "target", title: "Made by" },
    { key: "module", title: "Module" }, { key: "source", title: "Source" }, { key: "why", title: "Why" },
  ];
  const collator = new Intl.Collator("en", { numeric: true });
  const ranks = {};
  // Texts are compared once for each column; to sort is then to compare numbers.
  function rank(key) {
    if (ranks[key]) return ranks[key];
    const texts = [...new Set(rows.map((each) => each[key]))].sort(collator.compare);
    const places = new Map(texts.map((text, place) => [text, place]));
    return ranks[key] = Float64Array.from(rows, (each) => places.get(each[key]));
  }
  let order = { key: "bytes", way: -1 }, seen = rows, tops = null;
  const heights = new Map();  // of what is open, by row
  // A row, and the list where it is not laid out yet, in pixels.
  const ROW = 32, TALL = 620;

  function choose() {
    const words = at("filter").value.toLowerCase().split(/\s+/).filter(Boolean), action = at("action").value;
    seen = rows.filter((each) => (!action || each.action === action) && words.every((word) => each.text.includes(word)));
    const by = order.key === "bytes" ? Float64Array.from(rows, (each) => each.bytes) : rank(order.key);
    seen.sort((a, b) => order.way * (by[a.place] - by[b.place]) || b.bytes - a.bytes || a.place - b.place);
    const bytes = seen.reduce((sum, each) => sum + each.bytes, 0);
    at("shown").textContent = `${count(seen.length)} of ${count(rows.length)} storages, ${size(bytes)}`;
    table.setAttribute("aria-rowcount", String(seen.length + 1));
    region.scrollTop = 0;
    measure();
    render();
  }
  function measure() { tops = summed(seen.map((each) => ROW + (heights.get(each.place) || 0)), 0); }

  function render() {
    const top = region.scrollTop, first = Math.max(0, after(tops, top) - 1 - 8);
    const last = Math.min(seen.length, before(tops, top + Math.max(region.clientHeight, TALL)) + 8);
    // What has the focus is drawn anew, and gets it back.
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    body.replaceChildren(spacer(tops[first]), ...seen.slice(first, last).flatMap((each, i) => drawn(each, first + i)), spacer(tops[seen.length] - tops[last]));
    if (focused) body.querySelector(`button[data-place="${focused}"]`)?.focus({ preventScroll: true });
    remeasure();
  }
  function remeasure() {
    let changed = false;
    for (const more of body.querySelectorAll("tr.more")) {
      const place = Number(more.dataset.place), height = more.offsetHeight;
      if (height && heights.get(place) !== height) { heights.set(place, height); changed = true; }
    }
    if (changed) { measure(); render(); }
  }
  function spacer(height) {
    const row = made("tr"), cell = made("td", undefined, "spacer");
    row.setAttribute("aria-hidden", "true");
    cell.colSpan = columns.length;
    cell.style.height = height + "px";
    row.append(cell);
    return row;
  }
  function drawn(each, place) {
    const row = made("tr", undefined, "row"), isOpen = heights.has(each.place);
    row.setAttribute("aria-rowindex", String(place + 2));
    row.onclick = (event) => { if (!window.getSelection().toString() || event.target.tagName === "BUTTON") toggle(each); };
    for (const column of columns) row.append(cell(each, column, isOpen));
    return isOpen ? [row, more(each)] : [row];
  }
  function cell(each, column, isOpen) {
    const text = column.key === "bytes" ? size(each.bytes) : each[column.key];
    const made_ = made("td", column.key === "action" || column.key === "bytes" ? undefined : text, column.numeric ? "number" : "");
    if (column.key === "action") made_.append(made("span", text, "action " + text));
    else if (column.key !== "bytes") made_.title = text;
    if (column.key === "bytes") {
      const button = made("button", isOpen ? "\u25be" : "\u25b8");
      button.type = "button";
      button.dataset.place = each.place;
      button.setAttribute("aria-expanded", String(isOpen));
      button.setAttribute("aria-label", `${each.name}, ${size(each.bytes)}: views and verdicts`);
      made_.append(button, text);
    }
    return made_;
  }
  function toggle(each) {
    if (heights.has(each.place)) heights.delete(each.place); else heights.set(each.place, 0);
    measure();
    render();
  }

  function more(each) {
    const row = made("tr", undefined, "more"), cell_ = made("td");
    row.dataset.place = each.place;
    cell_.colSpan = columns.length;
    const [, , , , , , , , , , againWhy, againUs, linkUs, carried, views] = each.row;
    const holder = strings[each.row[8]], facts = [each.why];
    if (each.action === "recompute" && holder) facts.push(holder);
    if (againUs !== null) facts.push(`computing it again takes ${(againUs / 1000).toFixed(2)} ms`);
    else if (againWhy) facts.push("it cannot be computed again: " + strings[againWhy]);
    if (linkUs !== null) facts.push(`a copy takes ${(linkUs / 1000).toFixed(2)} ms each way`);
    if (carried !== null && carried !== each.bytes) facts.push(`a copy carries ${size(carried)}`);
    cell_.append(made("p", facts.join("; ")), made("p", `${each.target}${each.module ? " in " + each.module : ""}${each.source ? " (" + each.source + ")" : ""}`));
    if (views.length) cell_.append(viewTable(views));
    if (timeline && timeline.spansOf(each.place).length) {
      const button = made("button", "Show on the timeline");
      button.onclick = (event) => { event.stopPropagation(); timeline.reveal(each.place); };
      cell_.append(button);
    }
    row.append(cell_);
    return row;
  }
  function viewTable(views) {
    const inner = made("table"), head = made("tr");
    head.append(...["saved view", "tensor", "carries", "made by", ...rules].map((title) => made("th", title)));
    inner.createTHead().append(head);
    const rest = inner.createTBody();
    for (const view of views) {
      const [name, op, module, source, tensor, bytes, times, ...verdicts] = view, row = made("tr");
      const words = { module: strings[module], source: strings[source] };
      const by = strings[op] + (words.module ? " in " + words.module : "") + (words.source ? " (" + words.source + ")" : "");
      row.append(...[strings[name] + (times > 1 ? ` (saved ${times} times)` : ""), strings[tensor], size(bytes), by,
        ...rules.map((_, i) => strings[verdicts[2 * i]] + (verdicts[2 * i + 1] ? ", held by " + strings[verdicts[2 * i + 1]] : ""))].map((text) => made("td", text)));
      rest.append(row);
    }
    return inner;
  }

  // --- heads, filter ---

  const head = table.tHead.rows[0];
  function heads() {
    head.replaceChildren(...columns.map((column) => {
      const each = made("th", undefined, column.numeric ? "number" : ""), isOrder = order.key === column.key;
      each.scope = "col";
      if (column.width) each.style.width = column.width + "px";
      each.setAttribute("aria-sort", isOrder ? (order.way > 0 ? "ascending" : "descending") : "none");
      const button = made("button", column.title + (isOrder ? (order.way > 0 ? " \u25b4" : " \u25be") : ""));
      button.type = "button";
      button.dataset.key = column.key;
      button.onclick = () => {
        order = isOrder ? { key: column.key, way: -order.way } : { key: column.key, way: column.numeric ? -1 : 1 };
        heads();
        choose();
        head.querySelector(`[data-key="${column.key}"]`).focus();
      };
      each.append(button);
      return each;
    }));
  }
  const actions = new Map();
  for (const each of rows) actions.set(each.action, (actions.get(each.action) || 0) + 1);
  at("action").append(new Option(`all (${count(rows.length)})`, ""), ...[...actions].map(([action, number]) => new Option(`${action} (${count(number)})`, action)));
  at("filter").oninput = choose;
  at("action").onchange = choose;
  region.addEventListener("scroll", () => render(), { passive: true });
  heads();
  choose();

  // On paper: the first of them, in the order that was chosen.
  function print() {
    const left = seen.length - PRINTED;
    at("not-printed").textContent = left > 0 ? `${count(left)} more storages are not printed; the page on a screen lists them.` : "";
    body.replaceChildren(...seen.slice(0, PRINTED).flatMap((each, i) => drawn(each, i)));
  }
  return { choose, render, print, first: (number) => seen.slice(0, number).map((each) => each.name) };
})();

// --- light and dark, paper -----------------------------------------------------------------------

const root = document.documentElement, system = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
function themed() {
  at("theme").textContent = isDark() ? "Light" : "Dark";
  at("theme").setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  if (timeline) timeline.draw();
}
at("theme").onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; themed(); };
system.addEventListener("change", themed);
themed();
let onScreen = null;
window.addEventListener("beforeprint", () => {
  if (onScreen === null) onScreen = root.dataset.theme || "";
  root.dataset.theme = "light";
  themed();
  list.print();
});
window.addEventListener("afterprint", () => {
  if (onScreen) root.dataset.theme = onScreen; else delete root.dataset.theme;
  onScreen = null;
  themed();
  list.render();
});
// For whoever wants to ask the page from the console, and for its tests.
window.offplan = { found, timeline, list, size };
})();
