"use strict";
/* Draws the page from its block of data: lines, bars and dots as SVG, matrices on canvases. */

const page = JSON.parse(document.getElementById("data").textContent);
const tooltip = document.getElementById("tooltip");
const DASHES = ["", "7 4", "2 3", "10 3 2 3", "14 4"];
const NUM_COLOURS = 7;
/* ColorBrewer's YlGnBu in steps of equal distance in OKLab: even to the eye, and readable by lightness alone */
const MAP = ["ffffd9", "def2b2", "aedfb7", "7acbbc", "41b6c4", "279bc1", "1f7eb7", "2261a9", "24429b", "1b2c7e", "081d58"];
const STEPS = 254, UNKNOWN = 255;

/* ---- numbers as text ---- */
const isKnown = (value) => value !== null && value !== undefined;
const percent = (value) => (isKnown(value) ? `${(100 * value).toFixed(2)} %` : "nan");
const decimal = (value) => (isKnown(value) ? String(Number(value.toPrecision(4))) : "nan");
const whole = (value) => (isKnown(value) ? Math.round(value).toLocaleString("en") : "nan");
const scaled = (value, units, step) => {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`.trim();
};
const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
const short = (value) => scaled(value, ["", "k", "M", "G"], 1000);
const seconds = (value) => {
  if (value < 60) return `${Number(value.toPrecision(3))} s`;
  const unit = value < 3600 ? 1 : 60, count = Math.round(value / unit);
  return `${Math.floor(count / 60)} ${unit === 1 ? "min" : "h"} ${count % 60} ${unit === 1 ? "s" : "min"}`;
};

/* ---- elements ---- */
function make(parent, name, attributes = {}, text = null) {
  const isSvg = name === "svg" || (parent && parent.namespaceURI.endsWith("svg"));
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const styleOf = (number) => ({
  stroke: `var(--c${number % NUM_COLOURS})`,
  dash: DASHES[Math.floor(number / NUM_COLOURS + number) % DASHES.length],
});

function caption(place, title, remark = "") {
  const made = make(place, "figcaption", {}, title);
  if (remark) make(made, "small", {}, remark);
}

function showTooltip(text, x, y) {
  tooltip.textContent = text;
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(4, x + 14 + width > innerWidth ? x - width - 14 : x + 14)}px`;
  tooltip.style.top = `${Math.max(4, y + 14 + height > innerHeight ? y - height - 14 : y + 14)}px`;
}
const hideTooltip = () => { tooltip.hidden = true; };

/* Lets a drawing be explored by pointer and by arrow keys: `at(x, y)` and `move(dx, dy)` return
   {text, x, y} in the drawing's own pixels, or null. */
function explore(drawing, at, move) {
  const show = (found) => {
    if (!found) { hideTooltip(); return; }
    const box = drawing.getBoundingClientRect(), zoom = box.width / drawing.dataset.width;
    showTooltip(found.text, box.left + found.x * zoom, box.top + found.y * zoom);
  };
  drawing.tabIndex = 0;
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), zoom = drawing.dataset.width / box.width;
    show(at((event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom));
  });
  drawing.addEventListener("pointerleave", () => { hideTooltip(); at(-1, -1); });
  drawing.addEventListener("blur", () => { hideTooltip(); at(-1, -1); });
  drawing.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") hideTooltip();
    if (!steps) return;
    event.preventDefault();
    show(move(...steps));
  });
}

/* ---- tables ---- */
function tableUnder(place, header, rows) {
  const details = make(place, "details");
  make(details, "summary", {}, "as a table");
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const table = make(make(details, "div", { class: "wide" }), "table", { class: "sortable" });
    const top = make(make(table, "thead"), "tr"), body = make(table, "tbody");
    for (const name of header) make(top, "th", { scope: "col" }, name);
    for (const row of rows()) {
      const line = make(body, "tr");
      row.forEach(([value, text], column) =>
        make(line, column ? "td" : "th", { "data-value": value ?? "" }, text ?? String(value ?? "nan")));
    }
    makeSortable(table);
  });
}

function makeSortable(table) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = make(null, "button", { type: "button" }, heading.textContent);
    heading.replaceChildren(button);
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    button.addEventListener("click", () => {
      const falls = heading.getAttribute("aria-sort") === "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      const compare = new Intl.Collator("en", { numeric: true }).compare;
      rows.sort((a, b) => {
        const [one, two] = [key(a), key(b)];
        if (one === "" || two === "") return (one === "") - (two === "");
        const order = isNaN(one) || isNaN(two) ? compare(one, two) : one - two;
        return falls ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

/* ---- what drawings share ---- */
const widthOf = (place) => Math.max(260, place.clientWidth - 32);
const within = (value, count) => Math.min(count - 1, Math.max(0, value));

/* The text of a tick at x, moved to the left where the drawing's right edge would cut it. */
const tickText = (svg, x, y, width, text) => make(svg, "text", { x: Math.min(x, width - 3.6 * text.length), y, "text-anchor": "middle" }, text);

/* The SVG of rows with names on the left and values along the bottom, from the left to the right end. */
function rowsOf(holder, width, names, row, [low, high], label, format, summary) {
  const height = names.length * row, longest = Math.max(...names.map((name) => name.length));
  const [left, right] = [Math.min(width * 0.4, 14 + 6.6 * longest), width - 26], most = Math.max(4, Math.floor((left - 10) / 6.6));
  const toX = (value) => left + ((value - low) / (high - low)) * (right - left);
  const svg = make(holder, "svg", { viewBox: `0 0 ${width} ${height + 46}`, "data-width": width, role: "img", "aria-label": summary });
  for (const value of ticks(low, high, Math.max(2, Math.floor((right - left) / 90)))) {
    make(svg, "line", { class: "grid", x1: toX(value), x2: toX(value), y1: 0, y2: height + 2 });
    tickText(svg, toX(value), height + 20, width, format(value));
  }
  make(svg, "text", { x: (left + right) / 2, y: height + 40, "text-anchor": "middle" }, label);
  names.forEach((name, number) =>
    make(svg, "text", { x: left - 8, y: (number + 0.5) * row + 4, "text-anchor": "end" }, name.length > most ? `${name.slice(0, most - 1)}…` : name));
  return [svg, toX];
}

/* ---- lines ---- */
function ticks(low, high, most, smallest = 0) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(smallest, power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999));
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (isKnown(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low === high) return [low - Math.max(0.5, Math.abs(low) / 2), high + Math.max(0.5, Math.abs(low) / 2)];
  return [low, high];
}

function between([low, high], [least, most]) {
  return [Math.max(least, low), Math.min(most, high)];
}

function marker(svg, shape, x, y, style) {
  const paths = ["M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0", "M-3.5,-3.5h7v7h-7z", "M0,-4.5l4.5,8h-9z", "M0,-5l5,5l-5,5l-5,-5z", "M-4,4l8,-8m0,8l-8,-8"];
  make(svg, "path", { d: paths[shape % paths.length], transform: `translate(${x},${y})`, fill: style.stroke, stroke: style.stroke });
}

/* spec: title, remark, x and y: {label, format, ticks}, series: [{name, x, y, bands: [[low, high]]}] */
function lines(place, spec) {
  const hidden = new Set(spec.series.flatMap((one, number) => (one.isHidden ? [number] : [])));
  caption(place, spec.title, spec.remark);
  const holder = make(place, "div"), legend = make(place, "div", { class: "legend" });
  const draw = () => {
    holder.replaceChildren();
    const width = widthOf(place), height = Math.round(Math.min(360, Math.max(220, width * 0.52)));
    const [left, right, top, bottom] = [62, width - 26, 8, height - 44];
    const shown = spec.series.map((one, number) => ({ ...one, number })).filter((one) => !hidden.has(one.number));
    const [x0, x1] = extent(shown.flatMap((one) => one.x));
    let [y0, y1] = extent(shown.flatMap((one) => [...one.y, ...(one.bands ?? []).flat(2)]));
    if (spec.y.bound) [y0, y1] = between([y0 - 0.06 * (y1 - y0), y1 + 0.06 * (y1 - y0)], spec.y.bound);
    const toX = (value) => left + ((value - x0) / (x1 - x0)) * (right - left);
    const toY = (value) => bottom - ((value - y0) / (y1 - y0)) * (bottom - top);
    const svg = make(holder, "svg", { viewBox: `0 0 ${width} ${height}`, "data-width": width, role: "img", "aria-label": `${spec.title}: ${spec.y.label} by ${spec.x.label}. ${shown.map((one) => `${one.name}: last ${spec.y.format(one.y.findLast(isKnown))}`).slice(0, 12).join("; ")}` });
    for (const value of ticks(y0, y1, 5)) {
      make(svg, "line", { class: "grid", x1: left, x2: right, y1: toY(value), y2: toY(value) });
      make(svg, "text", { x: left - 8, y: toY(value) + 4, "text-anchor": "end" }, (spec.y.tick ?? spec.y.format)(value));
    }
    for (const value of ticks(x0, x1, Math.max(2, Math.floor(width / 110)), spec.x.isWhole ? 1 : 0)) {
      tickText(svg, toX(value), bottom + 18, width, (spec.x.tick ?? spec.x.format)(value));
    }
    make(svg, "text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label);
    make(svg, "text", { transform: `translate(13,${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.y.label);
    for (const one of shown) {
      const style = styleOf(one.number);
      for (const [low, high] of one.bands ?? []) {
        const known = low.map((_, n) => n).filter((n) => isKnown(low[n]) && isKnown(high[n]));
        const there = known.map((n) => `${toX(one.bandX[n])},${toY(high[n])}`), back = known.reverse().map((n) => `${toX(one.bandX[n])},${toY(low[n])}`);
        make(svg, "polygon", { points: [...there, ...back].join(" "), fill: style.stroke, opacity: 0.15 });
      }
      let path = "", isOpen = false;
      one.y.forEach((value, n) => {
        if (isKnown(value) && isKnown(one.x[n])) path += `${isOpen ? "L" : "M"}${toX(one.x[n]).toFixed(1)},${toY(value).toFixed(1)}`;
        isOpen = isKnown(value);
      });
      make(svg, "path", { d: path || "M0,0", fill: "none", stroke: style.stroke, "stroke-width": 2, "stroke-dasharray": style.dash, "stroke-linejoin": "round" });
      const known = one.y.map((value, n) => n).filter((n) => isKnown(one.y[n])), every = Math.max(1, Math.ceil(known.length / 6));
      known.forEach((n, order) => {
        if ((known.length - 1 - order) % every === 0) marker(svg, one.number, toX(one.x[n]), toY(one.y[n]), style);
      });
    }
    if (!shown.some((one) => one.y.some(isKnown))) make(svg, "text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no number to draw");
    const cursor = make(svg, "line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    let place_ = [0, -1];
    const point = (order, n) => {
      const one = shown[order];
      if (!one || !isKnown(one.x[n])) { cursor.setAttribute("visibility", "hidden"); return null; }
      place_ = [order, n];
      const x = toX(one.x[n]);
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x);
      cursor.setAttribute("visibility", "visible");
      const nearest = (other) => other.x.reduce((best, value, index) => (Math.abs(value - one.x[n]) < Math.abs(other.x[best] - one.x[n]) ? index : best), 0);
      const others = spec.x.isShared ? shown.slice(0, 14) : [one];
      const values = others.map((other) => `${other.name}: ${spec.y.format(other.y[other === one ? n : nearest(other)])}`);
      return { text: [`${spec.x.label}: ${spec.x.format(one.x[n])}`, ...values].join("\n"), x, y: isKnown(one.y[n]) ? toY(one.y[n]) : top };
    };
    const at = (x, y) => {
      let best = [-1, -1], least = Infinity;
      if (x >= left - 10) {
        shown.forEach((one, order) => one.x.forEach((value, n) => {
          if (!isKnown(one.y[n])) return;
          const away = Math.hypot(toX(value) - x, (toY(one.y[n]) - y) / (spec.x.isShared ? 8 : 1));
          if (away < least) { least = away; best = [order, n]; }
        }));
      }
      return point(...best);
    };
    explore(svg, at, (dx, dy) => {
      const order = Math.min(shown.length - 1, Math.max(0, place_[0] + dy)), count = shown[order]?.x.length ?? 0;
      return point(order, Math.min(count - 1, Math.max(0, (place_[1] < 0 ? count - 1 - Math.max(0, dx) : place_[1]) + dx)));
    });
  };
  spec.series.forEach((one, number) => {
    const button = make(legend, "button", { type: "button", "aria-pressed": String(!hidden.has(number)) });
    const key = make(button, "svg", { viewBox: "0 0 30 12", "aria-hidden": "true" }), style = styleOf(number);
    make(key, "line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: style.stroke, "stroke-width": 2, "stroke-dasharray": style.dash });
    marker(key, number, 15, 6, style);
    button.append(one.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(number)) hidden.add(number);
      button.setAttribute("aria-pressed", String(!hidden.has(number)));
      draw();
    });
  });
  tableUnder(place, ["line", spec.x.label, spec.y.label], () =>
    spec.series.flatMap((one) => one.x.map((x, n) => [[one.name], [x, spec.x.format(x)], [one.y[n], spec.y.format(one.y[n])]])));
  return draw;
}

/* ---- bars: rows of stacked parts ---- */
function bars(place, spec) {
  caption(place, spec.title, spec.remark);
  const holder = make(place, "div"), legend = make(place, "div", { class: "legend" });
  spec.parts.forEach((name, number) => {
    const entry = make(legend, "span"), key = make(entry, "svg", { viewBox: "0 0 30 12", "aria-hidden": "true" });
    make(key, "rect", { width: 22, height: 12, rx: 2, fill: styleOf(number).stroke });
    entry.append(name);
  });
  const draw = () => {
    holder.replaceChildren();
    const row = 26, most = Math.max(...spec.rows.map((one) => one.values.reduce((a, b) => a + b, 0))) || 1;
    const [svg, toX] = rowsOf(holder, widthOf(place), spec.rows.map((one) => one.name), row, [0, most], spec.label, spec.format, `${spec.title}, ${spec.label}`);
    spec.rows.forEach((one, number) => {
      let from = toX(0);
      one.values.forEach((value, part) => {
        const length = toX(value) - toX(0);
        if (length > 0) make(svg, "rect", { x: from, y: number * row + 4, width: length, height: row - 8, rx: 2, fill: styleOf(part).stroke, stroke: "var(--panel)" });
        from += length;
      });
    });
    let current = -1;
    const tell = (number) => {
      const one = spec.rows[number];
      current = one ? number : -1;
      return one ? { text: [one.name, ...spec.parts.map((name, n) => `${name}: ${spec.format(one.values[n])}`)].join("\n"), x: toX(0) + 40, y: number * row + 10 } : null;
    };
    explore(svg, (x, y) => tell(x < 0 ? -1 : Math.floor(y / row)), (dx, dy) => tell(within(current + dx + dy, spec.rows.length)));
  };
  tableUnder(place, ["", ...spec.parts], () => spec.rows.map((one) => [[one.name], ...one.values.map((value) => [value, spec.format(value)])]));
  return draw;
}

/* ---- matrices ---- */
const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const isDark = () => document.documentElement.dataset.theme === "dark";
const rgb = (hex) => [0, 2, 4].map((start) => parseInt(hex.replace("#", "").slice(start, start + 2), 16));

/* 256 colours by byte: low values are near the page's own colour, so that high ones stand out; after NUM_COLOURS
   names the colours begin again, paler */
function palette(isName) {
  const unknown = rgb(colour("line")), panel = rgb(colour("panel"));
  return Array.from({ length: 256 }, (_, code) => {
    if (code === UNKNOWN) return unknown;
    if (isName) return rgb(colour(`c${code % NUM_COLOURS}`)).map((part, n) => panel[n] + (part - panel[n]) / 2 ** Math.floor(code / NUM_COLOURS));
    const place = (isDark() ? 1 - code / STEPS : code / STEPS) * (MAP.length - 1), start = Math.min(MAP.length - 2, Math.floor(place));
    const [one, two] = [rgb(MAP[start]), rgb(MAP[start + 1])];
    return one.map((part, n) => part + (two[n] - part) * (place - start));
  });
}

/* A canvas of `width` x `height` CSS pixels, sharp on any screen. */
function canvasOf(place, width, height, label) {
  const ratio = Math.max(2, devicePixelRatio || 1);
  const canvas = make(place, "canvas", { width: width * ratio, height: height * ratio, "data-width": width, role: "img", "aria-label": label });
  canvas.style.width = `${width}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.fillStyle = colour("soft");
  return [canvas, context];
}

/* One value of `codes` a cell, [rows, columns], stretched over a rectangle. */
function cells(context, codes, rows, columns, colours, [x, y, width, height]) {
  const small = new OffscreenCanvas(columns, rows), inner = small.getContext("2d"), image = inner.createImageData(columns, rows);
  for (let n = 0; n < rows * columns; n += 1) {
    image.data.set(colours[codes[n]], 4 * n);
    image.data[4 * n + 3] = 255;
  }
  inner.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = rows > 2 * height || columns > 2 * width;
  context.drawImage(small, x, y, width, height);
}

/* spec: codes, rows and columns: {label, count, names}, colours, text(row, column), width, label, and optional
   number(row, column), which stands in cells that are large enough */
function matrix(place, spec) {
  const { rows, columns } = spec;
  const rowNames = rows.names?.length ? rows.names : null, columnNames = columns.names?.length ? columns.names : null;
  const letters = rowNames ? Math.min(18, Math.max(...rowNames.map((name) => name.length))) : String(rows.count).length;
  const left = 26 + 7 * letters;
  const longest = columnNames ? Math.max(...columnNames.map((name) => name.length)) : 0;
  const wide = Math.max(60, Math.min(spec.width - left - 4, columns.count * 30));
  const cell = wide / columns.count;
  const isTurned = columnNames && longest * 7 > cell;
  const tall = Math.max(rows.count, Math.min(rows.count * Math.min(26, Math.max(cell, 14)), Math.max(wide, rowNames ? rows.count * 16 : 0, 300)));
  const high = Math.min(tall, 900), bottom = high + 2;
  const foot = isTurned ? 8 + 6.5 * Math.min(18, longest) : 18;
  const [canvas, context] = canvasOf(place, left + wide + 4, bottom + foot + 18, spec.label);
  cells(context, spec.codes, rows.count, columns.count, spec.colours, [left, 2, wide, high]);
  const every = (count, pixels, least) => Math.max(1, ...[1, 2, 5, 10, 20, 50, 100, 200, 500].filter((step) => step * (pixels / count) >= least).slice(0, 1), count * least > pixels * 500 ? count : 1);
  context.textBaseline = "middle";
  if (spec.number && cell >= 22 && high / rows.count >= 13) {
    context.save();
    context.textAlign = "center";
    for (let n = 0; n < rows.count * columns.count; n += 1) {
      const [r, c] = [Math.floor(n / columns.count), n % columns.count], [red, green, blue] = spec.colours[spec.codes[n]];
      context.fillStyle = 0.3 * red + 0.59 * green + 0.11 * blue > 128 ? "#000" : "#fff";
      context.fillText(String(spec.number(r, c)), left + (c + 0.5) * cell, 2 + (r + 0.5) * (high / rows.count), cell - 2);
    }
    context.restore();
  }
  for (let n = 0; n < rows.count; n += every(rows.count, high, 13)) {
    context.textAlign = "right";
    context.fillText((rowNames?.[n] ?? String(n)).slice(0, 18), left - 5, 2 + (n + 0.5) * (high / rows.count));
  }
  for (let n = 0; n < columns.count; n += every(columns.count, wide, isTurned ? 13 : columnNames ? 10 : 9 * String(columns.count).length)) {
    context.save();
    context.translate(left + (n + 0.5) * cell, bottom + (isTurned ? 6 : 10));
    if (isTurned) context.rotate(-Math.PI / 2);
    context.textAlign = isTurned ? "right" : "center";
    context.fillText((columnNames?.[n] ?? String(n)).slice(0, 18), 0, 0);
    context.restore();
  }
  context.textAlign = "center";
  context.fillText(columns.label, left + wide / 2, bottom + foot + 8);
  context.save();
  context.translate(8, high / 2);
  context.rotate(-Math.PI / 2);
  context.fillText(rows.label, 0, 0);
  context.restore();
  let [row, column] = [0, -1];
  const tell = (r, c) => {
    if (r < 0 || c < 0 || r >= rows.count || c >= columns.count) return null;
    [row, column] = [r, c];
    return { text: spec.text(r, c), x: left + (c + 0.5) * cell, y: 2 + (r + 0.5) * (high / rows.count) };
  };
  explore(canvas, (x, y) => tell(Math.floor((y - 2) / (high / rows.count)), Math.floor((x - left) / cell)),
    (dx, dy) => tell(within(row + dy, rows.count), within(column + dx, columns.count)));
}

function picture(place, run, spec) {
  const codes = decode(spec.codes), shape = spec.shape, size = shape.reduce((a, b) => a * b, 1);
  const value = (code) => {
    if (code === UNKNOWN) return spec.isName ? "none" : "nan";
    return spec.isName ? String(code) : decimal(spec.low + (code / STEPS) * (spec.high - spec.low));
  };
  caption(place, spec.title, spec.caption);
  const isLayered = spec.axes.length === 3, isOverTime = spec.axes.length === 1;
  const names = (axis) => spec.names[axis] ?? [];
  const nameOf = (axis, n) => names(axis)[n] ?? `${axis} ${n}`;
  const controls = make(place, "div", { class: "controls" });
  let moment = spec.rounds.length - 1, client = 0;
  if (!isOverTime && spec.rounds.length > 1) {
    const label = make(controls, "label", {}, "round");
    const slider = make(label, "input", { type: "range", min: 0, max: moment, value: moment, step: 1, "aria-label": `${spec.title}: round` });
    const output = make(label, "output", {}, String(spec.rounds[moment]));
    slider.addEventListener("input", () => {
      moment = Number(slider.value);
      output.textContent = String(spec.rounds[moment]);
      slider.setAttribute("aria-valuetext", `round ${spec.rounds[moment]}`);
      draw();
    });
  } else if (!isOverTime) make(controls, "span", {}, `round ${spec.rounds[moment]}`);
  const ramp = spec.isName ? null : make(controls, "span", { class: "ramp" });
  const holder = make(place, "div", { class: "maps" });
  let one = null;
  if (isLayered) {
    const label = make(make(place, "div", { class: "controls" }), "label", {}, "one client, all layers:");
    const select = make(label, "select");
    for (let n = 0; n < shape[0]; n += 1) make(select, "option", { value: n }, `client ${n}`);
    select.addEventListener("change", () => { client = Number(select.value); draw(); });
    one = make(place, "div", { class: "maps" });
  }
  if (spec.note) make(place, "p", { class: "note" }, `Shown: ${spec.note}.`);
  const draw = () => {
    const colours = palette(spec.isName), width = Math.max(240, place.clientWidth - 32);
    holder.replaceChildren();
    if (ramp) {
      ramp.replaceChildren(decimal(spec.low));
      make(ramp, "i").style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((at) => `rgb(${colours[Math.round(at * STEPS)]})`)})`;
      ramp.append(decimal(spec.high));
    }
    const axisOf = (axis, count) => ({ label: axis, count, names: names(axis) });
    const now = codes.subarray(moment * size, (moment + 1) * size), label = `${spec.title}, round ${spec.rounds[moment]}`;
    if (isOverTime) {
      const [clients, moments] = [shape[0], spec.rounds.length], turned = new Uint8Array(clients * moments);
      for (let c = 0; c < clients; c += 1) for (let e = 0; e < moments; e += 1) turned[c * moments + e] = codes[e * clients + c];
      matrix(holder, { codes: turned, rows: axisOf("client", clients), columns: { label: "round", count: moments, names: spec.rounds.map(String) }, colours, width, label: spec.title, text: (r, c) => `client ${r}, round ${spec.rounds[c]}\n${spec.quantity}: ${value(turned[r * moments + c])}` });
      return;
    }
    if (!isLayered) {
      const [clients, count] = shape, [first, second] = spec.axes, text = (r, c) => `client ${r}, ${nameOf(second, c)}\n${spec.quantity}: ${value(now[r * count + c])}`;
      /* many clients lie side by side, where there is room for them */
      if (clients > 40 && 4 * count < clients) {
        const turned = Uint8Array.from(now, (_, n) => now[(n % clients) * count + Math.floor(n / clients)]);
        matrix(holder, { codes: turned, rows: axisOf(second, count), columns: axisOf(first, clients), colours, width, label, text: (r, c) => text(c, r) });
      } else matrix(holder, { codes: now, rows: axisOf(first, clients), columns: axisOf(second, count), colours, width: Math.min(width, 760), label, text });
      return;
    }
    const [clients, layers, last] = shape, end = spec.axes[2];
    const each = Math.min(width, Math.max(170, Math.min(330, Math.floor(width / Math.min(layers, 4)) - 22)));
    for (let layer = 0; layer < layers; layer += 1) {
      const box = make(holder, "div"), part = new Uint8Array(clients * last);
      make(box, "h4", {}, nameOf("layer", layer));
      for (let c = 0; c < clients; c += 1) part.set(now.subarray((c * layers + layer) * last, (c * layers + layer + 1) * last), c * last);
      matrix(box, { codes: part, rows: axisOf("client", clients), columns: axisOf(end, last), colours, width: each, label: `${label}, ${nameOf("layer", layer)}`, text: (r, c) => `${nameOf("layer", layer)}: client ${r}, ${nameOf(end, c)}\n${spec.quantity}: ${value(part[r * last + c])}` });
    }
    one.replaceChildren();
    const mine = now.subarray(client * layers * last, (client + 1) * layers * last);
    matrix(one, { codes: mine, rows: axisOf("layer", layers), columns: axisOf(end, last), colours, width: Math.min(width, 760), label: `${label}, client ${client}`, text: (r, c) => `client ${client}, ${nameOf("layer", r)}, ${nameOf(end, c)}\n${spec.quantity}: ${value(mine[r * last + c])}` });
  };
  return draw;
}

/* ---- clients: a bar of accuracy beside a strip of samples by class ---- */
function clientStrips(place, run) {
  const { accuracy, train_samples: samples } = run.clients, count = accuracy.length;
  const isUnseen = (c) => c >= count - run.numUnseen, nameOf = (c) => `client ${c}${isUnseen(c) ? ", unseen" : ""}`;
  const [, numClasses] = run.classes.shape ?? [0, 0];
  const raw = decode(run.classes.counts ?? ""), counts = new Uint16Array(raw.buffer);
  const most = counts.reduce((a, b) => Math.max(a, b), 1);
  caption(place, "Accuracy of each client beside its classes", `Left: accuracy ${run.isFinished ? "at the end" : `after round ${run.clientsRound}`} (${run.scored}). Right: samples of each class, training and scored ones together; the stronger the colour, the more, up to ${most}.${run.numUnseen ? " Pale bars: unseen clients, which take no part in training." : ""}`);
  const label = make(make(place, "div", { class: "controls" }), "label", {}, "order");
  const select = make(label, "select"), holder = make(place, "div");
  const orders = { client: (c) => c, accuracy: (c) => -(accuracy[c] ?? -1), samples: (c) => -(samples?.[c] ?? 0), "main class": (c) => numClasses && counts.subarray(c * numClasses, (c + 1) * numClasses).reduce((best, value, n, all) => (value > all[best] ? n : best), 0) };
  for (const name of Object.keys(orders)) make(select, "option", { value: name }, name);
  const draw = () => {
    holder.replaceChildren();
    const order = accuracy.map((_, c) => c).sort((a, b) => orders[select.value](a) - orders[select.value](b) || a - b);
    const width = widthOf(place), row = Math.min(24, Math.max(900 / count, count <= 100 ? 9 : 0.05));
    const height = Math.max(24, count * row), left = 40, middle = left + (width - left) * (numClasses ? 0.45 : 0.95), right = width - 4;
    const [canvas, context] = canvasOf(holder, width, height + 40, `Accuracy of ${count} clients beside their samples by class; the table below has the numbers`);
    const bar = (value) => (value ?? 0) * (middle - left - 14);
    context.textBaseline = "middle";
    order.forEach((c, n) => {
      const drawn = [left, 2 + n * row + row * 0.08, bar(accuracy[c]), Math.max(row * 0.84, 0.6)];
      context.fillStyle = context.strokeStyle = colour("c0");
      context.globalAlpha = isUnseen(c) ? 0.25 : 1;
      context.fillRect(...drawn);
      context.globalAlpha = 1;
      if (isUnseen(c) && row > 4) context.strokeRect(...drawn);
      if (!isKnown(accuracy[c]) && row > 8) {
        context.fillStyle = colour("soft");
        context.textAlign = "left";
        context.fillText("nan", left + 4, 2 + (n + 0.5) * row);
      }
      if (n % Math.max(1, Math.ceil(13 / row)) === 0) {
        context.fillStyle = colour("soft");
        context.textAlign = "right";
        context.fillText(String(c), left - 5, 2 + (n + 0.5) * row);
      }
    });
    context.fillStyle = colour("soft");
    context.textAlign = "center";
    for (const value of [0, 0.5, 1]) context.fillText(`${100 * value} %`, left + Math.max(8, bar(value)), height + 12);
    context.fillText("accuracy", left + bar(0.5), height + 28);
    if (numClasses) {
      const codes = new Uint8Array(count * numClasses), colours = palette(false);
      colours[UNKNOWN] = rgb(colour("panel"));
      order.forEach((c, n) => {
        for (let k = 0; k < numClasses; k += 1) codes[n * numClasses + k] = counts[c * numClasses + k] ? Math.round(40 + (counts[c * numClasses + k] / most) * 150) : UNKNOWN;
      });
      cells(context, codes, count, numClasses, colours, [middle, 2, right - middle, height]);
      const each = (right - middle) / numClasses;
      for (let k = 0; k < numClasses; k += Math.max(1, Math.ceil(22 / each))) context.fillText(String(k), middle + (k + 0.5) * each, height + 12);
      context.fillText("class", (middle + right) / 2, height + 28);
      context.strokeStyle = colour("line");
      context.strokeRect(middle, 2, right - middle, height);
    }
    let current = -1;
    const tell = (n) => {
      const c = order[n];
      current = n;
      if (c === undefined || n < 0) return null;
      const mine = [...counts.subarray(c * numClasses, (c + 1) * numClasses)].map((value, k) => [value, k]).filter(([value]) => value);
      const classes = mine.sort((a, b) => b[0] - a[0]).slice(0, 12).map(([value, k]) => `${k}: ${value}`).join(", ");
      return { text: `${nameOf(c)}\naccuracy: ${percent(accuracy[c])}${classes ? `\nsamples by class: ${classes}` : ""}`, x: left + bar(accuracy[c]), y: 2 + (n + 0.5) * row };
    };
    explore(canvas, (x, y) => tell(x < 0 ? -1 : Math.floor((y - 2) / row)), (dx, dy) => tell(within(current + dx + dy, count)));
  };
  select.addEventListener("change", draw);
  const columns = Object.entries(run.clients), format = (name) => (/accuracy|macro_f1|auc|calibration/.test(name) ? percent : name.includes("bytes") ? bytes : name === "loss" ? decimal : whole);
  tableUnder(place, ["client", ...columns.map(([name]) => name.replaceAll("_", " "))], () =>
    accuracy.map((_, c) => [[c, nameOf(c)], ...columns.map(([name, values]) => [values[c], isKnown(values[c]) ? format(name)(values[c]) : "nan"])]));
  return draw;
}

/* ---- confusion matrices: of all clients together, or of the chosen one ---- */
function confusion(place, run) {
  const { classes, lines } = run.confusion, all = new Uint32Array(decode(lines).buffer);
  const nameOf = (of) => (of ? `client ${of - 1}${of > run.clients.accuracy.length - run.numUnseen ? ", unseen" : ""}` : "all clients in training");
  const found = new Map();
  for (let n = 0; n < all.length; n += 4) {
    if (!found.has(all[n])) found.set(all[n], []);
    found.get(all[n]).push(all.subarray(n + 1, n + 4));
  }
  const byClass = (of) => {
    const rows = Array.from({ length: classes }, () => ({ samples: 0, right: 0 }));
    for (const [label, predicted, samples] of found.get(of)) {
      rows[label].samples += samples;
      if (label === predicted) rows[label].right += samples;
    }
    return rows;
  };
  caption(place, "Confusion matrix and accuracy by class", `${run.split === "val" ? "Validation" : "Test"} samples at the end of the run. Rows: true classes, with the share predicted correctly; columns: predicted classes. The colour is the share of the row's samples.`);
  const label = make(make(place, "div", { class: "controls" }), "label", {}, "samples of");
  const select = make(label, "select"), holder = make(place, "div", { class: "maps" });
  for (const of of found.keys()) make(select, "option", { value: of }, nameOf(of));
  const draw = () => {
    holder.replaceChildren();
    const of = Number(select.value), rows = byClass(of), codes = new Uint8Array(classes * classes), counts = new Uint32Array(classes * classes);
    rows.forEach(({ samples }, label) => { if (!samples) codes.fill(UNKNOWN, label * classes, (label + 1) * classes); });
    for (const [label, predicted, samples] of found.get(of)) {
      counts[label * classes + predicted] = samples;
      codes[label * classes + predicted] = Math.round((samples / rows[label].samples) * STEPS);
    }
    const names = rows.map(({ samples, right }, label) => `${label}: ${samples ? `${Number(((100 * right) / samples).toFixed(1))} %` : "-"}`);
    matrix(holder, {
      codes, rows: { label: "true class", count: classes, names }, columns: { label: "predicted class", count: classes }, colours: palette(false),
      width: Math.min(widthOf(place), 760), label: `Confusion matrix of ${nameOf(of)}; the table below has the accuracy by class`,
      number: (r, c) => counts[r * classes + c] || "",
      text: (r, c) => `${nameOf(of)}\nclass ${r}, predicted as ${c}\nsamples: ${counts[r * classes + c]} of ${rows[r].samples}`,
    });
  };
  select.addEventListener("change", draw);
  tableUnder(place, ["samples of", "class", "samples", "predicted correctly", "accuracy"], () =>
    [...found.keys()].flatMap((of) => byClass(of).flatMap(({ samples, right }, label) =>
      (samples ? [[[of, nameOf(of)], [label], [samples], [right], [right / samples, percent(right / samples)]]] : []))));
  return draw;
}

/* ---- spread of the clients' accuracy, a row a run ---- */
function distribution(place, runs) {
  const trained = (run) => (run.clients.accuracy ?? []).slice(0, run.clients.accuracy?.length - run.numUnseen);
  const early = runs.filter((run) => !run.isFinished && run.clients.accuracy).map((run) => `${run.label} after round ${run.clientsRound}`);
  const note = (runs.some((run) => run.numUnseen) ? " Unseen clients are left out." : "") + (early.length ? ` Not finished: ${early.join(", ")}.` : "");
  const known = runs.map((run) => trained(run).filter(isKnown).sort((a, b) => a - b));
  const hasDots = (values) => values.length <= 200 && runs.length <= 40, counted = known.filter((values) => values.length);
  const dots = counted.every(hasDots) ? "Each dot is a client; the" : counted.some(hasDots) ? "Each dot is a client, of runs with at most 200; the" : "The";
  caption(place, "Accuracy over the clients", `${dots} box spans the middle half, the line the middle eight tenths.${note}`);
  const holder = make(place, "div");
  const quantile = (values, share) => values[Math.min(values.length - 1, Math.round(share * (values.length - 1)))];
  const draw = () => {
    holder.replaceChildren();
    const row = 30, asTick = (value) => `${Number((100 * value).toFixed(1))} %`;
    const [svg, toX] = rowsOf(holder, widthOf(place), runs.map((run) => run.label), row, between(extent(known.flat()), [0, 1]), "accuracy", asTick, "Accuracy over the clients by run");
    runs.forEach((run, number) => {
      const values = known[number], y = number * row + row / 2, style = styleOf(number);
      if (!values.length) return;
      make(svg, "line", { x1: toX(quantile(values, 0.1)), x2: toX(quantile(values, 0.9)), y1: y, y2: y, stroke: style.stroke, "stroke-width": 2 });
      make(svg, "rect", { x: toX(quantile(values, 0.25)), width: Math.max(2, toX(quantile(values, 0.75)) - toX(quantile(values, 0.25))), y: y - 8, height: 16, fill: style.stroke, opacity: 0.3, rx: 3 });
      make(svg, "line", { x1: toX(quantile(values, 0.5)), x2: toX(quantile(values, 0.5)), y1: y - 8, y2: y + 8, stroke: style.stroke, "stroke-width": 3 });
      if (hasDots(values)) values.forEach((value) => make(svg, "circle", { cx: toX(value), cy: y, r: 2.5, fill: style.stroke, opacity: 0.7 }));
    });
    let current = -1;
    const tell = (number) => {
      const values = known[number];
      current = values ? number : -1;
      return values?.length ? { text: `${runs[number].label}\n${[0.1, 0.25, 0.5, 0.75, 0.9].map((share) => `${100 * share} % of the clients are below ${percent(quantile(values, share))}`).join("\n")}`, x: toX(quantile(values, 0.5)), y: number * row + 12 } : null;
    };
    explore(svg, (x, y) => tell(x < 0 ? -1 : Math.floor(y / row)), (dx, dy) => tell(within(current + dx + dy, runs.length)));
  };
  return draw;
}

/* ---- which drawing stands where ---- */
const ACCURACY = { label: "accuracy", format: percent, tick: (value) => `${Number((100 * value).toFixed(1))} %`, bound: [0, 1] };
const LOSS = { label: "loss (nats)", format: decimal };
const ROUND = { label: "round", format: whole, isWhole: true, isShared: true };

function overRounds(place, runs, isOne, kind) {
  const y = kind === "accuracy" ? ACCURACY : LOSS, field = `${kind}_mean`;
  const series = runs.map((run) => {
    const [lowest, low, high, highest] = run.bands[kind], has = lowest.filter(isKnown).length > 1 && runs.length <= 4;
    return { name: isOne ? `mean over clients, ${run.scored}` : run.label, x: run.curves.round, y: run.curves[field], bandX: run.bands.round, bands: has ? [[lowest, highest], ...(isOne ? [[low, high]] : [])] : [] };
  });
  const hasBands = series.some((one) => one.bands.length);
  if (isOne) {
    const add = (name, values, isHidden = false) => values?.some(isKnown) && series.push({ name, x: runs[0].curves.round, y: values, isHidden });
    add("unseen clients", runs[0].curves[`${kind}_unseen`]);
    if (kind === "loss") add("training loss", runs[0].curves.train_loss_mean);
    else for (const moment of ["after download", "after training"]) {
      const some = moment === "after training" && runs[0].trainsSome ? ", only the round's clients" : "";
      if (moment !== runs[0].scored) add(moment + some, runs[0].curves[`accuracy_${moment.replace(" ", "_")}`]);
    }
  }
  const bands = hasBands ? `Bands: the ${isOne ? "middle half and the " : ""}middle eight tenths of the clients.` : "";
  return lines(place, { title: kind === "accuracy" ? "Accuracy by round" : "Loss by round", remark: bands, x: ROUND, y, series });
}

function byCost(place, runs, field, x) {
  const valuesOf = (run) => run.curves[field] ?? [];
  if (!runs.some((run) => valuesOf(run).some((value) => value > 0))) return null;
  return lines(place, { title: `Accuracy against ${x.title ?? field}`, remark: x.remark, x, y: ACCURACY, series: runs.map((run) => ({ name: run.label, x: valuesOf(run), y: valuesOf(run).length ? run.curves.accuracy_mean : [] })) });
}

const DRAWINGS = {
  accuracy: (place, runs, isOne) => overRounds(place, runs, isOne, "accuracy"),
  loss: (place, runs, isOne) => overRounds(place, runs, isOne, "loss"),
  clients: (place, [run]) => (run.clients.accuracy ? clientStrips(place, run) : null),
  confusion: (place, [run]) => confusion(place, run),
  distribution: (place, runs) => distribution(place, runs),
  picture: (place, [run]) => {
    const spec = run.pictures[Number(place.dataset.picture)];
    if (!spec.lines) return picture(place, run, spec);
    const series = spec.lines.map((y, c) => ({ name: `client ${c}`, x: spec.rounds, y }));
    return lines(place, { title: spec.title, remark: spec.caption + (spec.note ? ` Shown: ${spec.note}.` : ""), x: ROUND, y: { label: spec.quantity, format: decimal, bound: spec.low < spec.high ? [spec.low, spec.high] : null }, series });
  },
  bytes: (place, runs, isOne) => {
    const parts = ["down", "up"], [{ layerBytes }] = runs, total = (run, way) => (run.layerBytes[way] ?? []).reduce((a, b) => a + b, 0);
    const rows = isOne ? layerBytes.layers.map((name, n) => ({ name, values: parts.map((way) => layerBytes[way][n]) })) : runs.map((run) => ({ name: run.label, values: parts.map((way) => total(run, way)) }));
    if (!rows.some((row) => row.values.some((value) => value > 0))) return null;
    return bars(place, { title: isOne ? "Bytes by layer and direction" : "Bytes by direction", remark: "Counted on the messages of all rounds.", rows, parts, format: bytes, label: "bytes" });
  },
  seconds: (place, runs) => {
    const there = runs.filter((run) => Object.keys(run.seconds).length);
    if (!there.length) return null;
    const parts = Object.keys(there[0].seconds);
    return bars(place, { title: "Where the time went", remark: "The rest: messages, the server, waiting, start.", rows: there.map((run) => ({ name: run.label, values: Object.values(run.seconds) })), parts, format: seconds, label: "time" });
  },
  "by-bytes": (place, runs) => byCost(place, runs, "bytes", { label: "bytes sent", format: bytes, remark: "Everything sent down and up, running statistics and indices too." }),
  "by-steps": (place, runs) => byCost(place, runs, "steps", { label: "training steps", format: whole, tick: short, remark: "Of all clients together; a step costs some methods more than others." }),
  "by-simulated": (place, runs) => byCost(place, runs, "simulated", { title: "simulated time", label: "simulated time", format: seconds, remark: "On the simulated clock, which clients.step_s starts." }),
};

const drawn = new Map();
function drawAll() {
  const open = [...document.querySelectorAll("[data-chart]")].filter((place) => !place.closest("details.run:not([open])"));
  for (const place of open) {
    if (drawn.has(place)) continue;
    const isOne = place.dataset.run !== undefined, runs = isOne ? [page.runs[Number(place.dataset.run)]] : page.runs;
    const draw = DRAWINGS[place.dataset.chart](place, runs, isOne);
    if (draw) drawn.set(place, draw);
    else place.remove();
  }
  /* only now have all places their widths */
  for (const place of open) drawn.get(place)?.();
}

const theme = document.getElementById("theme"), prefersDark = matchMedia("(prefers-color-scheme: dark)");
function wear(name) {
  document.documentElement.dataset.theme = name;
  theme.setAttribute("aria-pressed", String(name === "dark"));
  drawAll();
}
theme.addEventListener("click", () => wear(isDark() ? "light" : "dark"));
prefersDark.addEventListener("change", (event) => wear(event.matches ? "dark" : "light"));
let before = null;
addEventListener("beforeprint", () => { before = document.documentElement.dataset.theme; wear("light"); });
addEventListener("afterprint", () => wear(before));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
for (const details of document.querySelectorAll("details.run")) details.addEventListener("toggle", drawAll);
document.querySelectorAll("table.sortable").forEach(makeSortable);
wear(prefersDark.matches ? "dark" : "light");
