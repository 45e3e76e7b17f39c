// Draws the page's timelines on one canvas: lanes of bars, the load of links and what tiers hold, on one axis of time.
// What is seen stands in `window.tierstorePage.view`.  Drawing takes time by pixels, not by bars: where a pixel has
// several bars it is shaded by the share of its time that they fill.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("tierstore").textContent);
  const canvas = document.getElementById("canvas");
  const hover = document.getElementById("hover");
  const controls = document.getElementById("controls");
  const context = canvas.getContext("2d");
  const kindNames = Object.keys(data.kinds);
  const CAUSES = ["copy up", "room", "copy down", "disk", "collective", "host step"];
  const LEFT = 190, AXIS = 24, HEIGHTS = { lane: 22, load: 40, memory: 96, charge: 40 }, GAP = 4;
  const LEAST_S = 1e-9;

  // ---------------------------------------------------------------------------------------- numbers as text
  const seconds = (s) => {
    for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
      if (Math.abs(s) >= factor) return `${Number((s / factor).toPrecision(5))} ${unit}`;
    return s ? `${Number((s * 1e9).toPrecision(3))} ns` : "0 s";
  };
  const bytes = (n) => {
    for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]])
      if (Math.abs(n) >= 1024 ** power) return `${(n / 1024 ** power).toFixed(1)} ${unit}`;
    return `${Math.round(n)} B`;
  };

  // ---------------------------------------------------------------------------------------- what is in the data
  // How many of `times` are at most `at`.
  const countUntil = (times, at) => {
    let low = 0, high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] <= at) low = middle + 1; else high = middle;
    }
    return low;
  };

  // An amount that grows evenly during each bar: returns how much of it there is between two times.
  const growth = (begins, ends, amounts) => {
    const events = [];
    for (let i = 0; i < begins.length; i++) {
      if (!amounts[i]) continue;
      const end = Math.max(ends[i], begins[i] + LEAST_S), rate = amounts[i] / (end - begins[i]);
      events.push([begins[i], rate], [end, -rate]);
    }
    events.sort((a, b) => a[0] - b[0]);
    const times = new Float64Array(events.length), sums = new Float64Array(events.length);
    const rates = new Float64Array(events.length);
    let rate = 0, sum = 0;
    events.forEach(([at, change], i) => {
      if (i) sum += rate * (at - times[i - 1]);
      rate += change;
      times[i] = at; sums[i] = sum; rates[i] = rate;
    });
    const until = (at) => {
      const i = countUntil(times, at) - 1;
      return i < 0 ? 0 : i === times.length - 1 ? sums[i] : sums[i] + rates[i] * (at - times[i]);
    };
    return (from, to) => Math.max(0, until(to) - until(from));
  };

  const timelines = data.timelines.map((one, number) => {
    const lanes = one.lanes.map((lane) => {
      const { begin, end } = lane, latest = new Float64Array(end.length);
      end.forEach((at, i) => { latest[i] = i ? Math.max(latest[i - 1], at) : at; });
      const busy = lane.busy || end.map((at, i) => at - begin[i]);
      return {
        ...lane, latest, timeline: number, filled: growth(begin, end, busy),
        carried: lane.nbytes ? growth(begin, end, lane.nbytes) : null,
        color: { compute: "--compute", "host steps": "--host" }[lane.name] || (lane.name.includes("->") ? "--link" : "--other"),
      };
    });
    const steady = one.steps[Math.max(0, one.steps.length - one.period)];
    return { ...one, lanes, label: `${one.name} (${one.source})`, steadyBegin: steady ? steady[0] : 0, offset: 0, shown: true };
  });
  const kinds = Object.fromEntries(kindNames.map((kind) => [kind, true]));

  const wholeRange = () => {
    let begin = Infinity, end = -Infinity;
    for (const one of timelines.filter((each) => each.shown)) {
      for (const lane of one.lanes) {
        begin = Math.min(begin, lane.begin[0] + one.offset);
        end = Math.max(end, lane.latest[lane.latest.length - 1] + one.offset);
      }
      for (const [from, to] of one.steps) { begin = Math.min(begin, from + one.offset); end = Math.max(end, to + one.offset); }
      for (const times of [one.held.time, ...Object.values(one.charges).map((each) => each.time)])
        if (times.length) { begin = Math.min(begin, times[0] + one.offset); end = Math.max(end, times[times.length - 1] + one.offset); }
    }
    return begin <= end ? [begin, Math.max(end, begin + LEAST_S)] : [0, 1];
  };

  const view = { begin_s: 0, end_s: 1, lanes: [], rows: [], hovered: null, marked: null, frames: 0, drawn_ms: 0 };
  let whole = [0, 1], rows = [], pointer = null, colors = {}, isAsked = false;

  // Rows of the same lane of different timelines are neighbours: that is the overlay.
  const layOut = () => {
    const shown = timelines.filter((each) => each.shown);
    const suffix = (one) => (timelines.length > 1 ? ` · ${one.label}` : "");
    rows = [];
    const add = (kind, title, one, more) => rows.push({ kind, title: title + suffix(one), one, ...more });
    const each = (namesOf, addOne) => {
      for (const name of new Set(shown.flatMap(namesOf))) for (const one of shown) addOne(one, name);
    };
    each((one) => one.lanes.map((lane) => lane.name), (one, name) => {
      const lane = one.lanes.find((candidate) => candidate.name === name);
      if (lane) add("lane", name, one, { lane });
    });
    each((one) => one.lanes.filter((lane) => lane.carried).map((lane) => lane.name), (one, name) => {
      const lane = one.lanes.find((candidate) => candidate.name === name && candidate.carried);
      if (lane) add("load", `load of ${name}`, one, { lane });
    });
    for (const one of shown) if (one.held.time.length) add("memory", "held by kind", one, {});
    each((one) => Object.keys(one.charges), (one, tier) => {
      const charge = one.charges[tier];
      if (charge && charge.time.length) add("charge", `keys in ${tier}`, one, { charge, tier, most: charge.nbytes.reduce((a, b) => Math.max(a, b), 1) });
    });
    let top = AXIS;
    for (const row of rows) { row.top = top; row.height = HEIGHTS[row.kind]; top += row.height + GAP; }
    view.rows = rows.map(({ kind, title, top: y, height }) => ({ kind, title, top: y, height }));
    view.lanes = rows.filter((row) => row.kind === "lane").map((row) => row.title);
    canvas.style.height = `${top + GAP}px`;
  };

  // ---------------------------------------------------------------------------------------- drawing
  const readColors = () => {
    const style = getComputedStyle(document.documentElement);
    colors = new Proxy({}, { get: (known, name) => (known[name] ??= style.getPropertyValue(name).trim()) });
  };
  const width = () => canvas.clientWidth;
  const toX = (at) => LEFT + ((at - view.begin_s) / (view.end_s - view.begin_s)) * (width() - LEFT);
  const toTime = (x) => view.begin_s + ((x - LEFT) / (width() - LEFT)) * (view.end_s - view.begin_s);
  const causeOf = (one, lane, i) => (lane.cause ? one.names[lane.cause[i]] : null);
  const colorOf = (one, lane, i) => {
    const cause = CAUSES.indexOf(causeOf(one, lane, i));
    return colors[cause < 0 ? lane.color : `--cause-${cause}`];
  };

  const drawBars = ({ one, lane, top, height }, first, last) => {
    for (let i = first; i < last; i++) {
      const x = Math.max(LEFT, toX(lane.begin[i] + one.offset)), to = Math.min(width(), toX(lane.end[i] + one.offset));
      if (to < LEFT) continue;
      const length = lane.end[i] - lane.begin[i];
      context.globalAlpha = lane.busy && length ? Math.max(0.2, Math.min(1, lane.busy[i] / length)) : 1;
      context.fillStyle = colorOf(one, lane, i);
      context.fillRect(x, top, Math.max(1, to - x - (to - x > 3 ? 1 : 0)), height);
      const text = lane.label ? one.names[lane.label[i]] || "" : "";
      if (to - x > 40) {
        context.globalAlpha = 1;
        context.fillStyle = colors["--ground"];
        context.fillText(text.slice(0, Math.floor((to - x - 6) / 6.5)), x + 3, top + height / 2);
      }
    }
    context.globalAlpha = 1;
  };
  const drawShares = ({ one, lane, top, height }) => {
    for (let x = LEFT; x < width(); x++) {
      const from = toTime(x) - one.offset, to = toTime(x + 1) - one.offset;
      const share = lane.filled(from, to) / (to - from);
      if (share <= 0) continue;
      context.globalAlpha = Math.max(0.15, Math.min(1, share));
      context.fillStyle = colorOf(one, lane, Math.max(0, countUntil(lane.begin, to) - 1));
      context.fillRect(x, top, 1, height);
    }
    context.globalAlpha = 1;
  };
  const drawLane = (row) => {
    const { one, lane } = row;
    const first = countUntil(lane.latest, view.begin_s - one.offset - LEAST_S);
    const last = countUntil(lane.begin, view.end_s - one.offset);
    if (last - first > 2 * (width() - LEFT)) drawShares(row); else drawBars(row, first, last);
  };
  const capacityOf = (row) => {
    const known = data.rates[row.lane.name];
    if (known) return known;
    let most = 0;
    for (let x = LEFT; x < width(); x += 2) most = Math.max(most, loadAt(row, x));
    return most;
  };
  const loadAt = ({ one, lane }, x) => {
    const from = toTime(x) - one.offset, to = toTime(x + 2) - one.offset;
    return lane.carried(from, to) / (to - from);
  };
  const drawLoad = (row) => {
    const capacity = capacityOf(row);
    if (!capacity) return;
    context.fillStyle = colors["--load"];
    for (let x = LEFT; x < width(); x += 2) {
      const high = Math.min(1, loadAt(row, x) / capacity) * (row.height - 2);
      context.fillRect(x, row.top + row.height - high, 2, high);
    }
    drawLimit(row.top + 1);
  };
  const drawLimit = (y) => {
    context.strokeStyle = colors["--limit"];
    context.setLineDash([4, 3]);
    context.beginPath(); context.moveTo(LEFT, y + 0.5); context.lineTo(width(), y + 0.5); context.stroke();
    context.setLineDash([]);
  };
  const capacityOfFirst = () => Object.values(data.capacities)[0] || 0;
  const heldTop = () => Math.max(1, capacityOfFirst(), ...timelines.map((one) => one.peak[1]),
    ...timelines.map((one) => one.held.time.reduce((most, _, i) => Math.max(most, sumAt(one, i)), 0)));
  const sumAt = (one, i) => {
    let sum = 0;
    for (const column of Object.values(one.held.kinds)) sum += column[i];
    return sum;
  };
  // What is held between two times that are a pixel apart: at the change after which most is.
  const heldIn = (one, times, from, to, sizeOf) => {
    let best = countUntil(times, from) - 1;
    const last = countUntil(times, to);
    for (let i = best + 1; i < last; i++) if (best < 0 || sizeOf(i) > sizeOf(best)) best = i;
    return best;
  };
  let heldMost = 1;
  const drawMemory = ({ one, top, height }) => {
    for (let x = LEFT; x < width(); x++) {
      const i = heldIn(one, one.held.time, toTime(x) - one.offset, toTime(x + 1) - one.offset, (at) => sumAt(one, at));
      if (i < 0) continue;
      let y = top + height;
      kindNames.forEach((kind, number) => {
        const column = one.held.kinds[kind];
        if (!column || !kinds[kind] || !column[i]) return;
        const high = (column[i] / heldMost) * height;
        context.fillStyle = colors[`--kind-${number}`];
        context.fillRect(x, y - high, 1, high);
        y -= high;
      });
    }
    const limit = capacityOfFirst();
    if (limit) drawLimit(top + height - (limit / heldMost) * height);
  };
  const drawCharge = ({ one, charge, tier, most, top, height }) => {
    const scale = Math.max(most, data.capacities[tier] || 0);
    context.fillStyle = colors["--other"];
    for (let x = LEFT; x < width(); x++) {
      const i = heldIn(one, charge.time, toTime(x) - one.offset, toTime(x + 1) - one.offset, (at) => charge.nbytes[at]);
      if (i < 0) continue;
      const high = (charge.nbytes[i] / scale) * height;
      context.fillRect(x, top + height - high, 1, high);
    }
    if (data.capacities[tier]) drawLimit(top + height - (data.capacities[tier] / scale) * height);
  };
  const drawAxis = () => {
    const span = view.end_s - view.begin_s, raw = span / Math.max(2, (width() - LEFT) / 120);
    const power = 10 ** Math.floor(Math.log10(raw));
    const unit = [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= raw);
    context.fillStyle = colors["--faint"];
    context.strokeStyle = colors["--line"];
    for (let n = Math.ceil(view.begin_s / unit), count = 0; n * unit <= view.end_s && count < 100; n++, count++) {
      const x = Math.round(toX(n * unit)) + 0.5;
      context.beginPath(); context.moveTo(x, AXIS - 4); context.lineTo(x, canvas.clientHeight); context.stroke();
      context.fillText(seconds(Number((n * unit).toPrecision(12))), x + 3, AXIS / 2);
    }
  };
  const drawSteps = () => {
    context.strokeStyle = colors["--faint"];
    const one = timelines.find((each) => each.shown);
    if (!one || one.steps.length > width()) return;
    for (const [begin] of one.steps) {
      const x = Math.round(toX(begin + one.offset)) + 0.5;
      if (x < LEFT || x > width()) continue;
      context.beginPath(); context.moveTo(x, AXIS); context.lineTo(x, canvas.clientHeight); context.stroke();
    }
  };
  const DRAW = { lane: drawLane, load: drawLoad, memory: drawMemory, charge: drawCharge };
  const draw = () => {
    isAsked = false;
    const begun = performance.now(), scale = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(width() * scale));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colors["--ground"];
    context.fillRect(0, 0, width(), canvas.clientHeight);
    rows.forEach((row, number) => {
      if (number % 2) return;
      context.fillStyle = colors["--stripe"];
      context.fillRect(0, row.top, width(), row.height);
    });
    drawAxis();
    for (const row of rows) DRAW[row.kind](row);
    drawSteps();
    for (const row of rows) {
      context.fillStyle = colors["--text"];
      context.save();
      context.beginPath(); context.rect(0, row.top, LEFT - 6, row.height); context.clip();
      context.fillText(row.title, 4, row.top + Math.min(row.height, 24) / 2);
      context.restore();
    }
    if (view.marked) {
      context.globalAlpha = 0.25;
      context.fillStyle = colors["--focus"];
      const [from, to] = view.marked.map(toX).sort((a, b) => a - b);
      context.fillRect(from, AXIS, to - from, canvas.clientHeight);
      context.globalAlpha = 1;
    }
    view.frames++;
    view.drawn_ms = performance.now() - begun;
  };
  const ask = () => { if (!isAsked) { isAsked = true; requestAnimationFrame(draw); } };

  // ---------------------------------------------------------------------------------------- what is under the pointer
  const barAt = ({ one, lane }, at) => {
    const reach = (3 / (width() - LEFT)) * (view.end_s - view.begin_s);
    const last = countUntil(lane.begin, at + reach);
    let best = -1, nearest = Infinity;
    for (let i = last - 1; i >= 0 && last - i < 1000 && lane.latest[i] >= at - reach; i--) {
      const away = Math.max(0, lane.begin[i] - at, at - lane.end[i]);
      if (away <= reach && away < nearest) { best = i; nearest = away; }
    }
    return best;
  };
  const describeBar = (row, at) => {
    const { one, lane } = row, i = barAt(row, at);
    if (i < 0) return null;
    const name = lane.label ? one.names[lane.label[i]] : null, key = lane.key ? one.names[lane.key[i]] : null;
    const count = lane.count ? lane.count[i] : 1, nbytes = lane.nbytes ? lane.nbytes[i] : 0;
    const length = lane.end[i] - lane.begin[i], cause = causeOf(one, lane, i);
    const lines = [row.title, count > 1 ? `${count} intervals, the longest: ${name}` : name];
    if (key !== null && key !== name) lines.push(`key ${key}`);
    lines.push(`${seconds(length)} from ${seconds(lane.begin[i])}`);
    if (count > 1) lines.push(`busy for ${seconds(lane.busy[i])}`);
    if (cause) lines.push(`waits for: ${cause}`);
    if (nbytes) lines.push(`${bytes(nbytes)}, ${length ? `${bytes(nbytes / length)}/s` : "at once"}`);
    return { text: lines.join("\n"), name, key, lane: lane.name, timeline: one.name };
  };
  const describeLoad = (row, x) => {
    const load = loadAt(row, x), capacity = data.rates[row.lane.name];
    return { text: `${row.title}\n${bytes(load)}/s${capacity ? `, ${(100 * load / capacity).toFixed(1)} % of ${bytes(capacity)}/s` : ""}`, load };
  };
  const describeMemory = ({ one, title }, at) => {
    const i = countUntil(one.held.time, at) - 1;
    if (i < 0) return null;
    const lines = kindNames.filter((kind) => one.held.kinds[kind]).map((kind) => `${data.kinds[kind]}: ${bytes(one.held.kinds[kind][i])}`);
    return { text: [title, ...lines, `altogether: ${bytes(sumAt(one, i))}`].join("\n") };
  };
  const describeCharge = ({ charge, title }, at) => {
    const i = countUntil(charge.time, at) - 1;
    return i < 0 ? null : { text: `${title}\n${bytes(charge.nbytes[i])}` };
  };
  const describe = (x, y) => {
    const row = rows.find((each) => y >= each.top && y < each.top + each.height);
    if (!row) return null;
    if (x < LEFT) return { text: row.title };  // all of what may be cut off there
    const at = toTime(x) - row.one.offset;
    switch (row.kind) {
      case "lane": return describeBar(row, at);
      case "load": return describeLoad(row, x);
      case "memory": return describeMemory(row, at);
      default: return describeCharge(row, at);
    }
  };
  const showHover = (event) => {
    const box = canvas.getBoundingClientRect();
    view.hovered = describe(event.clientX - box.left, event.clientY - box.top);
    hover.hidden = !view.hovered;
    if (!view.hovered) return;
    hover.textContent = view.hovered.text;
    const left = Math.min(event.clientX + 14, window.innerWidth - hover.offsetWidth - 8);
    const below = event.clientY + 18, isLow = below + hover.offsetHeight > window.innerHeight;
    hover.style.left = `${Math.max(0, left)}px`;
    hover.style.top = `${isLow ? Math.max(0, event.clientY - hover.offsetHeight - 10) : below}px`;
  };

  // ---------------------------------------------------------------------------------------- moving and zooming
  const look = (begin, end) => {
    const least = Math.max(LEAST_S * 10, Math.abs(whole[1]) * 1e-12), most = whole[1] - whole[0];
    const span = Math.min(most, Math.max(least, end - begin));
    const from = Math.min(Math.max(whole[0], begin), whole[1] - span);
    view.begin_s = from;
    view.end_s = from + span;
    ask();
  };
  const zoom = (factor, at = (view.begin_s + view.end_s) / 2) =>
    look(at - (at - view.begin_s) * factor, at + (view.end_s - at) * factor);
  const move = (share) => {
    const by = share * (view.end_s - view.begin_s);
    look(view.begin_s + by, view.end_s + by);
  };
  const lookAtAll = () => { whole = wholeRange(); look(...whole); };
  const lookAtStep = (by) => {
    const one = timelines.find((each) => each.shown && each.steps.length);
    if (!one) return;
    const middle = (view.begin_s + view.end_s) / 2 - one.offset;
    const isWhole = view.end_s - view.begin_s >= whole[1] - whole[0];
    const now = Math.max(0, countUntil(one.steps.map((step) => step[0]), middle) - 1);
    const step = one.steps[isWhole ? (by < 0 ? 0 : one.steps.length - 1) : Math.min(one.steps.length - 1, Math.max(0, now + by))];
    look(step[0] + one.offset, step[1] + one.offset);
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const x = event.clientX - canvas.getBoundingClientRect().left;
    const pixels = event.deltaMode ? 30 : 1;  // some mice count lines
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(((event.deltaX || event.deltaY) * pixels) / 1000);
    else zoom(Math.exp((event.deltaY * pixels) / 400), toTime(Math.max(LEFT, x)));
    showHover(event);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const x = event.clientX - canvas.getBoundingClientRect().left;
    pointer = { x, begin: view.begin_s, end: view.end_s };
    if (event.shiftKey) view.marked = [toTime(x), toTime(x)];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    if (pointer && view.marked) { view.marked[1] = toTime(Math.max(LEFT, x)); ask(); }
    else if (pointer) {
      const by = ((pointer.x - x) / (width() - LEFT)) * (pointer.end - pointer.begin);
      look(pointer.begin + by, pointer.end + by);
    }
    showHover(event);
  });
  const release = () => {
    if (view.marked) {
      const [begin, end] = view.marked.slice().sort((a, b) => a - b);
      view.marked = null;
      if (end > begin) look(begin, end); else ask();
    }
    pointer = null;
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { view.hovered = null; hover.hidden = true; });
  const KEYS = {
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    0: lookAtAll, Home: lookAtAll, "[": () => lookAtStep(-1), "]": () => lookAtStep(1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!Object.hasOwn(KEYS, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  // ---------------------------------------------------------------------------------------- what is shown
  const addCheck = (title, isOn, change, color = null) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = isOn;
    box.addEventListener("change", () => change(box.checked));
    label.append(box);
    if (color) {
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = `var(${color})`;
      label.append(swatch);
    }
    label.append(title);
    controls.append(label);
  };
  const lineUp = (isOn) => {
    for (const one of timelines) one.offset = isOn ? timelines[0].steadyBegin - one.steadyBegin : 0;
    lookAtAll();
  };
  if (timelines.length > 1) {
    for (const one of timelines) addCheck(one.label, true, (isOn) => { one.shown = isOn; layOut(); lookAtAll(); });
    if (timelines.every((one) => one.steps.length)) addCheck("last steps begin together", false, lineUp);
  }
  kindNames.forEach((kind, number) => {
    if (timelines.some((one) => one.held.kinds[kind]))
      addCheck(data.kinds[kind], true, (isOn) => { kinds[kind] = isOn; ask(); }, `--kind-${number}`);
  });

  heldMost = heldTop();
  readColors();
  layOut();
  lookAtAll();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); ask(); });
  new ResizeObserver(ask).observe(canvas);
  window.tierstorePage = { view, look, describe };
})();
