"use strict";
// The page of `fastweights inspect`. Text is drawn on a canvas, the visible lines alone; details are made for one token.

const NONE = 65535, PER_BIT = 16, CELLS_OF_TAB = 4;
const number = (x, digits = 2) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const whole = x => x.toLocaleString("en");
const percent = byte => byte < 2 ? "under 1 %" : Math.round(byte / 2.55) + " %";

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

async function inflate(node) {
  const packed = Uint8Array.from(atob(node.textContent.trim()), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  node.remove();
  return new Response(stream).arrayBuffer();
}

async function unpack(node) {
  const buffer = await inflate(node), length = new DataView(buffer).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { uint8: Uint8Array, uint16: Uint16Array };
  const arrays = {};
  for (const [name, { type, at, shape }] of Object.entries(about.arrays))
    arrays[name] = Object.assign(new types[type](buffer, 4 + length + at, shape.reduce((a, b) => a * b, 1)), { width: shape[1] || 1 });
  return Object.assign(about, { arrays });
}

// Where every character is: lines of `columns` cells, from the characters and the tokens that they belong to.
class Layout {
  constructor(characters, tokenOf, columns) {
    this.cells = new Uint16Array(characters.length);
    const starts = [0];
    let column = 0;
    for (let i = 0; i < characters.length; i++) {
      const width = cellsOf(characters[i]);
      if (column + width > columns && column > 0) { starts.push(i); column = 0; }
      this.cells[i] = column;
      column += width;
      if (characters[i] === "\n") { starts.push(i + 1); column = 0; }
    }
    this.starts = Int32Array.from(starts);
    this.count = starts.length;
  }
  lineOf(i) {
    let low = 0, high = this.count - 1;
    while (low < high) { const middle = (low + high + 1) >> 1; if (this.starts[middle] <= i) low = middle; else high = middle - 1; }
    return low;
  }
  end(line, total) { return line + 1 < this.count ? this.starts[line + 1] : total; }
}

function cellsOf(c) {
  const code = c.codePointAt(0);
  if (code === 9) return CELLS_OF_TAB;
  return code >= 0x1100 && (code <= 0x115f || (code >= 0x2e80 && code <= 0xd7a3) || (code >= 0xf900 && code <= 0xfaff)
    || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60) || code >= 0x1f300) ? 2 : 1;
}

const visible = c => c === "\n" ? "↵" : c === "\t" ? "→" : c.codePointAt(0) < 32 ? "·" : c;

class View {
  constructor(data, place, onselect) {
    Object.assign(this, { data, onselect, token: 0, mode: data.modes[data.modes.length - 1].key, back: null, marks: new Map() });
    this.characters = Array.from(data.text);
    this.first = new Int32Array(data.tokens + 1);  // first character of each token
    for (let t = 0; t < data.tokens; t++) this.first[t + 1] = this.first[t] + data.arrays.chars[t];
    this.tokenOf = new Int32Array(this.characters.length);
    for (let t = 0; t < data.tokens; t++) this.tokenOf.fill(t, this.first[t], this.first[t + 1]);
    this.followed = data.memories.filter(m => m.followed);
    this.layer = this.followed.length ? this.followed[this.followed.length - 1].index : null;
    this.build(place);
  }

  build(place) {
    const d = this.data, id = `view${View.count = (View.count || 0) + 1}`;
    const radios = d.modes.map(m => this.radio(id, m.key, m.label, m.key === this.mode));
    if (d.back.length) {
      radios.push(this.radio(id, "back", "memory rolled back to token", false));
      this.points = make("select", { "aria-label": "Token that the memory is rolled back to", onchange: () => this.setMode("back") },
        ...d.back.map(at => make("option", { value: at }, whole(at))));
      radios.push(this.points);
    }
    this.sentence = make("p", { class: "about" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.filler = make("div");
    this.box = make("div", { class: "fw-text", tabindex: "0", role: "application", "aria-describedby": `${id}-keys`,
      "aria-label": `Text of ${d.file}, ${whole(d.tokens)} tokens, coloured by surprise` }, this.canvas, this.filler);
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("click", event => this.click(event));
    this.box.addEventListener("keydown", event => this.key(event));
    this.detail = make("section", { class: "detail", "aria-live": "polite", "aria-label": "The chosen token" });
    const bits = d.modes.map(m => `${m.label} ${number(m.bits, 3)}`).join(", ");
    place.append(make("section", { "aria-labelledby": `${id}-name` },
      make("h2", { id: `${id}-name` }, d.name),
      make("p", {}, `${whole(d.tokens)} tokens, ${whole(d.bytes)} bytes of ${d.file}${d.memories.length ? `; ${d.memories.length} memories` : ""}. Bits per byte: ${bits}.`),
      make("fieldset", {}, make("legend", {}, "Surprise with"), ...radios),
      this.sentence,
      make("div", { class: "scale" }, make("span", { class: "whole" }, "0 bits"), make("i"), `${number(d.quantiles[4], 1)} bits and more. ` +
        `Half of the tokens cost less than ${number(d.quantiles[2], 1)}.`),
      make("p", { class: "about", id: `${id}-keys` }, "The stronger its colour, the less a token was expected. Click one, or move with the arrow keys, to see " +
        (this.followed.length ? "where its prediction came from (underlined) and what its write took out (outlined)." : "what it cost.")),
      make("div", { class: "look" }, this.box, this.detail),
      ...this.charts(id), ...this.table()));
    this.setMode(this.mode);
    new ResizeObserver(() => this.resize()).observe(this.box);
    this.resize();
    this.select(0, false);
  }

  radio(group, key, label, checked) {
    const input = make("input", { type: "radio", name: group, value: key, onchange: () => this.setMode(key) });
    input.checked = checked;
    return make("label", {}, input, " " + label);
  }

  setMode(mode) {
    this.mode = mode;
    const d = this.data, radio = this.box.closest("section")?.querySelector(`input[value="${mode}"]`);
    if (radio) radio.checked = true;
    if (mode === "back") {
      const at = Number(this.points.value);
      this.losses = d.arrays[`back.${at}`];
      this.from = at;
      this.sentence.textContent = `From token ${whole(at)} on, every window starts with the memory as it was there: what was read later is not known. ` +
        "Text before it is shown without colour.";
    } else {
      this.losses = d.arrays[`loss.${mode}`];
      this.from = 0;
      this.sentence.textContent = d.modes.find(m => m.key === mode).about;
    }
    if (this.detail.childElementCount) this.describe();
    this.draw();
  }

  bits(t) { return t < this.from ? null : this.losses[t - this.from] / PER_BIT; }

  resize() {
    const ratio = window.devicePixelRatio || 1, width = this.box.clientWidth, height = this.box.clientHeight;
    if (!width || (width === this.width && ratio === this.ratio)) return;
    Object.assign(this, { width, height, ratio });
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    this.canvas.style.width = width + "px"; this.canvas.style.height = height + "px";
    this.context = this.canvas.getContext("2d");
    this.font = `${width < 500 ? 13 : 14}px ui-monospace, "DejaVu Sans Mono", monospace`;
    this.context.font = this.font;
    this.cell = this.context.measureText("M").width;
    this.line = width < 500 ? 20 : 21;
    this.layout = new Layout(this.characters, this.tokenOf, Math.max(8, Math.floor((width - 12) / this.cell)));
    this.filler.style.height = Math.max(0, this.layout.count * this.line - height) + "px";
    this.show(this.token);
    this.draw();
  }

  draw() {
    if (!this.layout || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const { context: c, layout, ratio, cell, line, characters } = this, style = getComputedStyle(document.documentElement);
    const heat = style.getPropertyValue("--heat"), ink = style.getPropertyValue("--ink"), accent = style.getPropertyValue("--accent");
    const most = Math.max(1, this.data.quantiles[4]), top = this.box.scrollTop;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = this.font;
    c.textBaseline = "middle";
    const first = Math.max(0, Math.floor(top / line)), last = Math.min(layout.count - 1, Math.floor((top + this.height) / line));
    this.painted = last - first + 1;
    for (let n = first; n <= last; n++) {
      const y = n * line - top;
      for (let i = layout.starts[n]; i < layout.end(n, characters.length); i++) {
        const t = this.tokenOf[i], x = 6 + layout.cells[i] * cell, w = cellsOf(characters[i]) * cell, bits = this.bits(t);
        if (bits !== null && bits > 0) {
          c.fillStyle = `rgba(${heat}, ${Math.min(0.95, 0.95 * bits / most).toFixed(3)})`;
          c.fillRect(x, y + 1, w + 0.5, line - 2);
        }
        const mark = this.marks.get(t);
        if (mark) {
          c.fillStyle = c.strokeStyle = accent;
          if (mark.read) c.fillRect(x, y + line - 4, w, 3);
          if (mark.take) { c.lineWidth = 1.5; c.strokeRect(x + 0.5, y + 1.5, w - 1, line - 4); }
        }
        if (t === this.token) { c.lineWidth = 2.5; c.strokeStyle = ink; c.strokeRect(x, y + 1, w, line - 2); }
        c.fillStyle = ink;
        c.globalAlpha = characters[i] < " " ? 0.45 : 1;
        c.fillText(visible(characters[i]), x, y + line / 2);
        c.globalAlpha = 1;
      }
    }
  }

  click(event) {
    const box = this.box.getBoundingClientRect();
    const n = Math.floor((event.clientY - box.top - this.box.clientTop + this.box.scrollTop) / this.line);
    if (n < 0 || n >= this.layout.count) return;
    const cell = Math.floor((event.clientX - box.left - this.box.clientLeft - 6) / this.cell);
    let i = this.layout.starts[n];
    while (i + 1 < this.layout.end(n, this.characters.length) && this.layout.cells[i + 1] <= cell) i++;
    if (i < this.characters.length) this.select(this.tokenOf[i]);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.height / this.line) - 1), by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lines = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page }[event.key];
    let token = { Home: 0, End: this.data.tokens - 1 }[event.key];
    if (by) token = this.token + by;
    if (lines) {
      const here = Math.min(this.first[this.token], this.characters.length - 1), line = this.layout.lineOf(here);
      const there = Math.min(this.layout.count - 1, Math.max(0, line + lines));
      let i = this.layout.starts[there];
      while (i + 1 < this.layout.end(there, this.characters.length) && this.layout.cells[i + 1] <= this.layout.cells[here]) i++;
      token = this.tokenOf[Math.min(i, this.characters.length - 1)];
    }
    if (token === undefined) return;
    event.preventDefault();
    this.select(Math.min(this.data.tokens - 1, Math.max(0, token)));
  }

  select(token, tell = true) {
    this.token = token;
    this.show(token);
    this.describe();
    this.draw();
    if (tell) this.onselect(this, this.first[token]);
  }

  selectCharacter(i) { if (i < this.characters.length) this.select(this.tokenOf[i], false); }

  show(token) {
    if (!this.layout) return;
    const y = this.layout.lineOf(Math.min(this.first[token], this.characters.length - 1)) * this.line;
    if (y < this.box.scrollTop || y + this.line > this.box.scrollTop + this.height) this.box.scrollTop = y - this.height / 3;
  }

  piece(t) { return this.characters.slice(this.first[t], this.first[t + 1]).map(visible).join("") || "(part of a character)"; }

  snippet(t) {
    const a = Math.max(0, this.first[t] - 16), b = Math.min(this.characters.length, this.first[t + 1] + 8);
    const part = (x, y) => this.characters.slice(x, y).map(visible).join("");
    return make("span", { class: "snippet" }, part(a, this.first[t]), make("mark", {}, part(this.first[t], this.first[t + 1])), part(this.first[t + 1], b));
  }

  sources(kind, t) {
    const a = this.data.arrays, back = a[`${kind}.${this.layer}`], share = a[`${kind}.share.${this.layer}`], found = [];
    for (let j = 0; j < back.width; j++) {
      const at = t * back.width + j;
      if (back[at] !== NONE) found.push({ token: t - back[at], share: share[at] });
    }
    return { found, earlier: a[`${kind}.earlier.${this.layer}`][t] };
  }

  list({ found, earlier }, own) {
    const items = found.map(({ token, share }) => make("li", {}, `${percent(share)} `,
      make("button", { type: "button", onclick: () => { this.select(token); this.box.focus(); },
        "aria-label": `Go to token ${whole(token)}, ${percent(share)}` }, this.snippet(token)),
      " ", make("span", { class: "whole" }, token === this.token ? own : `${whole(this.token - token)} token${this.token - token === 1 ? "" : "s"} before`)));
    if (earlier > 2) items.push(make("li", {}, `${percent(earlier)} from text before the window that is kept`));
    return items.length ? make("ol", {}, ...items) : make("p", {}, "Nothing.");
  }

  describe() {
    const d = this.data, t = this.token, rows = d.modes.map(m => [m.label, d.arrays[`loss.${m.key}`][t] / PER_BIT]);
    for (const at of d.back) if (at <= t && this.mode === "back" && at === Number(this.points.value))
      rows.push([`rolled back to token ${whole(at)}`, d.arrays[`back.${at}`][t - at] / PER_BIT]);
    const parts = [make("h3", {}, `Token ${whole(t)}: `, make("span", { class: "snippet" }, this.piece(t))), make("p", {}, this.snippet(t)),
      make("table", {}, make("caption", {}, "Surprise: bits that the token cost."),
        ...rows.map(([label, bits]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "number" }, number(bits, 1)))))];
    const earlier = d.back.filter(at => at <= t);
    if (earlier.length) {
      const at = earlier[earlier.length - 1];
      parts.push(make("p", {}, make("button", { type: "button", onclick: () => { this.points.value = at; this.setMode("back"); } },
        "Roll the memory back to here"), ` (to the nearest memory that is kept, token ${whole(at)})`));
    }
    this.marks = new Map();
    if (this.layer !== null) {
      const chosen = make("select", { "aria-label": "Memory", onchange: () => { this.layer = Number(chosen.value); this.describe(); this.draw(); this.detail.querySelector("select")?.focus(); } },
        ...this.followed.map(m => make("option", { value: m.index }, `${m.name} (${m.rule})`)));
      chosen.value = this.layer;
      const reads = this.sources("reads", t), takes = this.sources("takes", t), a = d.arrays, i = this.layer;
      for (const { token } of reads.found) this.marks.set(token, { read: true });
      for (const { token } of takes.found) this.marks.set(token, Object.assign(this.marks.get(token) || {}, { take: true }));
      parts.push(make("p", {}, "Memory: ", chosen),
        make("h3", {}, "Where its read came from"), this.list(reads, "its own write"),
        make("h3", {}, "What its write took out"), this.list(takes, "itself"),
        make("p", { class: "about" }, `It wrote at a rate of ${number(a[`beta.${i}`][t] / 127.5)}; its value was ` +
          `${a[`error.${i}`][t] === 255 ? "2 or more" : number(a[`error.${i}`][t] / 127.5)} times its own size away from what its key retrieved (cosine ${number(a[`cosine.${i}`][t] / 127.5 - 1)}). ` +
          "Shares are means over heads, of the sizes of all parts."));
    }
    this.detail.replaceChildren(...parts);
  }

  charts(id) {
    return [["maps", "What each token did"], ["curves", "What the memory became"]].filter(([kind]) => this.data.figures[kind].length).map(([kind, title]) => {
      const made = this.data.figures[kind], chart = make("div", { class: "chart", role: "img" }), about = make("p", { class: "about" });
      const draw = () => {
        const one = made[choice.selectedIndex];
        about.textContent = one.about;
        chart.setAttribute("aria-label", `${one.title} over the position in the text, by layer and head. ${one.about}`);
        plot(chart, one.figure);
      };
      const choice = make("select", { "aria-label": title, onchange: draw }, ...made.map(m => make("option", {}, m.title)));
      View.drawn.push(draw);
      chart.jump = x => this.select(Math.min(this.data.tokens - 1, Math.max(0, Math.round(x))));
      return make("section", {}, make("h3", {}, title, " "), choice, about, chart);
    });
  }

  table() {
    const rows = this.data.overwritten, title = make("h3", {}, "The most overwritten");
    if (!this.followed.length) return [];
    if (!rows.length) return [make("section", {}, title, make("p", { class: "about" }, "Nothing: these memories add, and take nothing out."))];
    return [make("section", {}, title,
      make("div", { class: "wide" }, make("table", {},
        make("caption", {}, "Tokens of whose values later writes took out the most, summed over memories: names that were given a new meaning."),
        make("tr", {}, make("th", { scope: "col", class: "number" }, "token"), make("th", { scope: "col" }, "text"), make("th", { scope: "col", class: "number" }, "taken out")),
        ...rows.map(r => make("tr", {}, make("td", { class: "number" }, make("button", { type: "button", "aria-label": `Go to token ${whole(r.token)}`,
          onclick: () => { this.select(r.token); this.box.focus(); } }, whole(r.token))), make("td", {}, this.snippet(r.token)),
          make("td", { class: "number" }, number(r.taken)))))))];
  }
}
View.drawn = [];

function plot(chart, figure) {
  const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true }, narrow = chart.clientWidth < 600;
  const layout = Object.assign({}, figure.layout, { font: { color: ink, size: narrow ? 10 : 12 }, hovermode: "closest",
    xaxis: Object.assign({}, figure.layout.xaxis, axis), yaxis: Object.assign({}, figure.layout.yaxis, axis), height: chart.clientHeight,
    showlegend: !narrow && figure.data.length > 1, legend: { font: { size: 10 } } });
  if (narrow && figure.data[0].type === "heatmap") layout.yaxis.showticklabels = false;
  const data = figure.data.map(x => x.type === "heatmap" && narrow ? Object.assign({}, x, { colorbar: Object.assign({}, x.colorbar, { thickness: 10, title: { text: "" } }) }) : x);
  Plotly.react(chart, data, layout, { displaylogo: false, responsive: true, displayModeBar: false }).then(() => {
    chart.removeAllListeners?.("plotly_click");
    chart.on("plotly_click", event => chart.jump(event.points[0].x));
  });
}

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  const button = document.getElementById("theme");
  button.setAttribute("aria-pressed", dark);
}

async function start() {
  const status = document.getElementById("status"), main = document.getElementById("views");
  if (!window.DecompressionStream) { status.textContent = "This browser cannot unpack the data (it has no DecompressionStream); expected one from 2023 or later."; return; }
  const prefers = matchMedia("(prefers-color-scheme: dark)"), redraw = () => { View.drawn.forEach(draw => draw()); views.forEach(v => v.draw()); };
  const views = [];
  setTheme(prefers.matches);
  document.getElementById("theme").addEventListener("click", () => { setTheme(!document.documentElement.classList.contains("dark")); redraw(); });
  prefers.addEventListener("change", event => { setTheme(event.matches); redraw(); });
  const library = make("script");
  library.textContent = new TextDecoder().decode(await inflate(document.getElementById("plotly")));
  document.head.append(library);
  const blocks = await Promise.all([...document.querySelectorAll("script.model")].map(unpack));
  main.classList.toggle("two", blocks.length > 1);
  const together = (from, character) => views.forEach(v => { if (v !== from) v.selectCharacter(character); });
  for (const block of blocks) views.push(new View(block, main, together));
  View.drawn.forEach(draw => draw());
  window.views = views;
  status.textContent = "";
  status.hidden = true;
  document.body.dataset.ready = "true";
}

start().catch(error => { document.getElementById("status").textContent = `The page could not be shown: ${error.message}`; throw error; });
