// The page of `fastweights inspect`: one View for each model. Only the visible lines of the text are drawn, on a canvas,
// and details are made for one token alone, so that a text of 100,000 tokens scrolls.

const MARGIN = 6;  // pixels left of the text

// One model's text, details, charts and table. Its state:
//   token   the chosen token
//   mode    key of the mode whose losses colour the text, or "back": memory rolled back
//   losses  of that mode, from token `from` on
//   memory  index of the memory whose sources are shown; null where none was followed
//   marks   tokens that are sources of the chosen one: token -> { read, take }
class View {
  // onselect(view, character) is called when the user chooses a token, which begins with that character.
  constructor(data, parent, onselect) {
    this.data = data;
    this.onselect = onselect;
    this.token = 0;
    this.mode = data.modes[data.modes.length - 1].key;
    this.marks = new Map();
    this.characters = Array.from(data.text);
    this.first = new Int32Array(data.tokens + 1);  // first character of each token
    this.tokenOf = new Int32Array(this.characters.length);  // token of each character
    for (let t = 0; t < data.tokens; t++) {
      this.first[t + 1] = this.first[t] + data.arrays.chars[t];
      this.tokenOf.fill(t, this.first[t], this.first[t + 1]);
    }
    this.followed = data.memories.filter(memory => memory.followed);
    this.memory = this.followed.length ? this.followed[this.followed.length - 1].index : null;
    this.build(parent);
  }

  // Make the elements of the view.
  build(parent) {
    const data = this.data;
    View.count = (View.count || 0) + 1;
    const id = `view${View.count}`;
    const radios = data.modes.map(mode => this.radio(id, mode.key, mode.label, mode.key === this.mode));
    if (data.back.length) {
      radios.push(this.radio(id, "back", "memory rolled back to token", false));
      this.points = make("select", { "aria-label": "Token that the memory is rolled back to", onchange: () => this.setMode("back") },
        ...data.back.map(token => make("option", { value: token }, whole(token))));
      radios.push(this.points);
    }
    this.sentence = make("p", { class: "about" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.filler = make("div");  // as high as the rest of the text, so that the box scrolls
    this.box = make("div", { class: "fw-text", tabindex: "0", role: "application", "aria-describedby": `${id}-keys`,
      "aria-label": `Text of ${data.file}, ${whole(data.tokens)} tokens, coloured by surprise` }, this.canvas, this.filler);
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("click", event => this.click(event));
    this.box.addEventListener("keydown", event => this.key(event));
    this.detail = make("section", { class: "detail", "aria-live": "polite", "aria-label": "The chosen token" });
    const bits = data.modes.map(mode => `${mode.label} ${number(mode.bits, 3)}`).join(", ");
    const memories = data.memories.length ? `; ${data.memories.length} memories` : "";
    const shown = this.followed.length ? "where its prediction came from (underlined) and what its write took out (outlined)." : "what it cost.";
    parent.append(make("section", { "aria-labelledby": `${id}-name` },
      make("h2", { id: `${id}-name` }, data.name),
      make("p", {}, `${whole(data.tokens)} tokens, ${whole(data.bytes)} bytes of ${data.file}${memories}. Bits per byte: ${bits}.`),
      make("fieldset", {}, make("legend", {}, "Surprise with"), ...radios),
      this.sentence,
      make("div", { class: "scale" }, make("span", { class: "whole" }, "0 bits"), make("i"), `${number(data.quantiles[4], 1)} bits and more. ` +
        `Half of the tokens cost less than ${number(data.quantiles[2], 1)}.`),
      make("p", { class: "about", id: `${id}-keys` }, "The stronger its colour, the less a token was expected. Click one, or move with the arrow keys, to see " + shown),
      make("div", { class: "look" }, this.box, this.detail),
      ...this.charts(), ...this.table()));
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

  // The token that is chosen for "memory rolled back to token".
  rolledBackTo() {
    return Number(this.points.value);
  }

  // Colour the text by the losses of a mode.
  setMode(mode) {
    this.mode = mode;
    const radio = this.box.closest("section")?.querySelector(`input[value="${mode}"]`);
    if (radio) radio.checked = true;
    if (mode === "back") {
      this.from = this.rolledBackTo();
      this.losses = this.data.arrays[`back.${this.from}`];
      this.sentence.textContent = `From token ${whole(this.from)} on, every window starts with the memory as it was there: what was read later is not known. ` +
        "Text before it is shown without colour.";
    } else {
      this.from = 0;
      this.losses = this.data.arrays[`loss.${mode}`];
      this.sentence.textContent = this.data.modes.find(other => other.key === mode).about;
    }
    if (this.detail.childElementCount) this.describe();
    this.draw();
  }

  // What token t cost in the mode, in bits; null where the mode says nothing about it.
  bits(t) {
    return t < this.from ? null : this.losses[t - this.from] / STEPS_PER_BIT;
  }

  // Lay the text out anew when the width of the box has changed.
  resize() {
    const ratio = window.devicePixelRatio || 1, width = this.box.clientWidth, height = this.box.clientHeight;
    if (!width || (width === this.width && ratio === this.ratio)) return;
    Object.assign(this, { width, height, ratio });
    const narrow = width < 500;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    this.context = this.canvas.getContext("2d");
    this.font = `${narrow ? 13 : 14}px ui-monospace, "DejaVu Sans Mono", monospace`;
    this.context.font = this.font;
    this.cell = this.context.measureText("M").width;
    this.line = narrow ? 20 : 21;
    this.layout = new Layout(this.characters, Math.max(8, Math.floor((width - 2 * MARGIN) / this.cell)));
    this.filler.style.height = Math.max(0, this.layout.count * this.line - height) + "px";
    this.show(this.token);
    this.draw();
  }

  // Paint the text once, when the browser is next ready.
  draw() {
    if (!this.layout || this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.paint();
    });
  }

  // Paint the visible lines: colour by surprise, marks of sources, the chosen token, characters.
  paint() {
    const { context, layout, line, characters } = this, style = getComputedStyle(document.documentElement);
    const colours = { heat: style.getPropertyValue("--heat"), ink: style.getPropertyValue("--ink"), accent: style.getPropertyValue("--accent") };
    const top = this.box.scrollTop;
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = this.font;
    context.textBaseline = "middle";
    const first = Math.max(0, Math.floor(top / line)), last = Math.min(layout.count - 1, Math.floor((top + this.height) / line));
    this.painted = last - first + 1;
    for (let n = first; n <= last; n++)
      for (let i = layout.starts[n]; i < layout.end(n); i++)
        this.paintCharacter(characters[i], this.tokenOf[i], MARGIN + layout.cells[i] * this.cell, n * line - top, colours);
  }

  // Paint one character of token t, whose upper left corner is at (x, y).
  paintCharacter(character, t, x, y, { heat, ink, accent }) {
    const { context, line } = this, width = cellsOf(character) * this.cell, bits = this.bits(t), mark = this.marks.get(t);
    if (bits !== null && bits > 0) {
      const most = Math.max(1, this.data.quantiles[4]);
      context.fillStyle = `rgba(${heat}, ${Math.min(0.95, 0.95 * bits / most).toFixed(3)})`;
      context.fillRect(x, y + 1, width + 0.5, line - 2);
    }
    if (mark) {
      context.fillStyle = context.strokeStyle = accent;
      if (mark.read) context.fillRect(x, y + line - 4, width, 3);
      if (mark.take) {
        context.lineWidth = 1.5;
        context.strokeRect(x + 0.5, y + 1.5, width - 1, line - 4);
      }
    }
    if (t === this.token) {
      context.lineWidth = 2.5;
      context.strokeStyle = ink;
      context.strokeRect(x, y + 1, width, line - 2);
    }
    context.fillStyle = ink;
    context.globalAlpha = character < " " ? 0.45 : 1;
    context.fillText(visible(character), x, y + line / 2);
    context.globalAlpha = 1;
  }

  // Choose the token under the mouse.
  click(event) {
    const box = this.box.getBoundingClientRect();
    const line = Math.floor((event.clientY - box.top - this.box.clientTop + this.box.scrollTop) / this.line);
    if (line < 0 || line >= this.layout.count) return;
    const cell = Math.floor((event.clientX - box.left - this.box.clientLeft - MARGIN) / this.cell);
    const i = this.layout.characterAt(line, cell);
    if (i < this.characters.length) this.select(this.tokenOf[i]);
  }

  // Move the choice by a token, a line or a page, or to an end of the text.
  key(event) {
    const page = Math.max(1, Math.floor(this.height / this.line) - 1);
    const tokens = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const lines = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page }[event.key];
    let token = { Home: 0, End: this.data.tokens - 1 }[event.key];
    if (tokens) token = this.token + tokens;
    if (lines) {
      const last = this.characters.length - 1, current = Math.min(this.first[this.token], last);
      const line = Math.min(this.layout.count - 1, Math.max(0, this.layout.lineOf(current) + lines));
      token = this.tokenOf[Math.min(this.layout.characterAt(line, this.layout.cells[current]), last)];
    }
    if (token === undefined) return;
    event.preventDefault();
    this.select(Math.min(this.data.tokens - 1, Math.max(0, token)));
  }

  // Choose a token; byUser: other views follow.
  select(token, byUser = true) {
    this.token = token;
    this.show(token);
    this.describe();
    this.draw();
    if (byUser) this.onselect(this, this.first[token]);
  }

  selectCharacter(i) {
    if (i < this.characters.length) this.select(this.tokenOf[i], false);
  }

  // Choose a token from outside the text, and go back to the text.
  jump(token) {
    this.select(token);
    this.box.focus();
  }

  // Scroll until a token is visible.
  show(token) {
    if (!this.layout) return;
    const y = this.layout.lineOf(Math.min(this.first[token], this.characters.length - 1)) * this.line;
    if (y < this.box.scrollTop || y + this.line > this.box.scrollTop + this.height) this.box.scrollTop = y - this.height / 3;
  }

  // The characters from a to b as they are shown.
  excerpt(a, b) {
    return this.characters.slice(a, b).map(visible).join("");
  }

  // A token with the text around it.
  snippet(t) {
    const [a, b] = [this.first[t], this.first[t + 1]];
    return make("span", { class: "snippet" }, this.excerpt(Math.max(0, a - 16), a), make("mark", {}, this.excerpt(a, b)),
      this.excerpt(b, Math.min(this.characters.length, b + 8)));
  }

  // The sources of token t in the chosen memory, of its read ("reads") or its write ("takes").
  sources(kind, t) {
    const arrays = this.data.arrays, distance = arrays[`${kind}.${this.memory}`], share = arrays[`${kind}.share.${this.memory}`];
    const found = [];
    for (let i = t * distance.width; i < (t + 1) * distance.width; i++)
      if (distance[i] !== NONE) found.push({ token: t - distance[i], share: share[i] });
    return { found, earlier: arrays[`${kind}.earlier.${this.memory}`][t] };
  }

  // Sources as a list of links; `itself` is what the chosen token is called where it is its own source.
  list({ found, earlier }, itself) {
    const items = found.map(({ token, share }) => {
      const distance = this.token - token, before = `${whole(distance)} token${distance === 1 ? "" : "s"} before`;
      const link = make("button", { type: "button", onclick: () => this.jump(token),
        "aria-label": `Go to token ${whole(token)}, ${percent(share)}` }, this.snippet(token));
      return make("li", {}, `${percent(share)} `, link, " ", make("span", { class: "whole" }, distance === 0 ? itself : before));
    });
    if (earlier > 2) items.push(make("li", {}, `${percent(earlier)} from text before the window that is kept`));
    return items.length ? make("ol", {}, ...items) : make("p", {}, "Nothing.");
  }

  // Say what is known of the chosen token.
  describe() {
    const t = this.token, text = this.excerpt(this.first[t], this.first[t + 1]) || "(part of a character)";
    const parts = [make("h3", {}, `Token ${whole(t)}: `, make("span", { class: "snippet" }, text)), make("p", {}, this.snippet(t)), this.costs(t)];
    const earlier = this.data.back.filter(token => token <= t);
    if (earlier.length) {
      const nearest = earlier[earlier.length - 1];
      const rollBack = () => {
        this.points.value = nearest;
        this.setMode("back");
      };
      parts.push(make("p", {}, make("button", { type: "button", onclick: rollBack }, "Roll the memory back to here"),
        ` (to the nearest memory that is kept, token ${whole(nearest)})`));
    }
    this.marks = new Map();
    if (this.memory !== null) parts.push(...this.describeMemory(t));
    this.detail.replaceChildren(...parts);
  }

  // A table of what token t cost in every mode.
  costs(t) {
    const { data } = this, rows = data.modes.map(mode => [mode.label, data.arrays[`loss.${mode.key}`][t] / STEPS_PER_BIT]);
    if (this.mode === "back" && this.rolledBackTo() <= t) rows.push([`rolled back to token ${whole(this.rolledBackTo())}`, this.bits(t)]);
    return make("table", {}, make("caption", {}, "Surprise: bits that the token cost."),
      ...rows.map(([label, bits]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", { class: "number" }, number(bits, 1)))));
  }

  // What the chosen memory did at token t: sources of its read and write, which are marked in the text, and the write.
  describeMemory(t) {
    const arrays = this.data.arrays, i = this.memory;
    const choose = () => {
      this.memory = Number(choice.value);
      this.describe();
      this.draw();
      this.detail.querySelector("select")?.focus();
    };
    const choice = make("select", { "aria-label": "Memory", onchange: choose },
      ...this.followed.map(memory => make("option", { value: memory.index }, `${memory.name} (${memory.rule})`)));
    choice.value = i;
    const reads = this.sources("reads", t), takes = this.sources("takes", t);
    for (const { token } of reads.found) this.marks.set(token, { read: true });
    for (const { token } of takes.found) this.marks.set(token, Object.assign(this.marks.get(token) || {}, { take: true }));
    const error = arrays[`error.${i}`][t] === 255 ? "2 or more" : number(arrays[`error.${i}`][t] / 127.5);
    return [make("p", {}, "Memory: ", choice),
      make("h3", {}, "Where its read came from"), this.list(reads, "its own write"),
      make("h3", {}, "What its write took out"), this.list(takes, "itself"),
      make("p", { class: "about" }, `It wrote at a rate of ${number(arrays[`beta.${i}`][t] / 127.5)}; its value was ` +
        `${error} times its own size away from what its key retrieved (cosine ${number(arrays[`cosine.${i}`][t] / 127.5 - 1)}). ` +
        "Shares are means over heads, of the sizes of all parts.")];
  }

  // Two charts with a choice each: maps of tokens and heads, curves of the memories.
  charts() {
    const kinds = [["maps", "What each token did"], ["curves", "What the memory became"]];
    return kinds.filter(([kind]) => this.data.figures[kind].length).map(([kind, title]) => {
      const figures = this.data.figures[kind], chart = make("div", { class: "chart", role: "img" }), about = make("p", { class: "about" });
      const draw = () => {
        const chosen = figures[choice.selectedIndex];
        about.textContent = chosen.about;
        chart.setAttribute("aria-label", `${chosen.title} over the position in the text, by layer and head. ${chosen.about}`);
        plot(chart, chosen.figure);
      };
      const choice = make("select", { "aria-label": title, onchange: draw }, ...figures.map(figure => make("option", {}, figure.title)));
      View.redraw.push(draw);
      chart.jump = x => this.select(Math.min(this.data.tokens - 1, Math.max(0, Math.round(x))));
      return make("section", {}, make("h3", {}, title, " "), choice, about, chart);
    });
  }

  // The table of the tokens of whose values later writes took out the most.
  table() {
    const rows = this.data.overwritten, title = make("h3", {}, "The most overwritten");
    if (!this.followed.length) return [];
    if (!rows.length) return [make("section", {}, title, make("p", { class: "about" }, "Nothing: these memories add, and take nothing out."))];
    const head = make("tr", {}, make("th", { scope: "col", class: "number" }, "token"), make("th", { scope: "col" }, "text"),
      make("th", { scope: "col", class: "number" }, "taken out"));
    const body = rows.map(({ token, taken }) => {
      const link = make("button", { type: "button", "aria-label": `Go to token ${whole(token)}`, onclick: () => this.jump(token) }, whole(token));
      return make("tr", {}, make("td", { class: "number" }, link), make("td", {}, this.snippet(token)), make("td", { class: "number" }, number(taken)));
    });
    const caption = make("caption", {}, "Tokens of whose values later writes took out the most, summed over memories: names that were given a new meaning.");
    return [make("section", {}, title, make("div", { class: "wide" }, make("table", {}, caption, head, ...body)))];
  }
}
View.redraw = [];  // functions that draw the charts of all views

function setTheme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  document.getElementById("theme").setAttribute("aria-pressed", dark);
}

async function start() {
  const status = document.getElementById("status"), main = document.getElementById("views");
  if (!window.DecompressionStream) {
    status.textContent = "This browser cannot unpack the data (it has no DecompressionStream); expected one from 2023 or later.";
    return;
  }
  const views = [], prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const changeTheme = dark => {
    setTheme(dark);
    View.redraw.forEach(draw => draw());
    views.forEach(view => view.draw());
  };
  setTheme(prefersDark.matches);
  document.getElementById("theme").addEventListener("click", () => changeTheme(!document.documentElement.classList.contains("dark")));
  prefersDark.addEventListener("change", event => changeTheme(event.matches));
  const library = make("script");
  library.textContent = new TextDecoder().decode(await inflate(document.getElementById("plotly")));
  document.head.append(library);
  const models = await Promise.all([...document.querySelectorAll("script.model")].map(unpack));
  main.classList.toggle("two", models.length > 1);
  const follow = (chosen, character) => {  // all views show the same place of the text
    for (const view of views) if (view !== chosen) view.selectCharacter(character);
  };
  for (const model of models) views.push(new View(model, main, follow));
  View.redraw.forEach(draw => draw());
  window.views = views;
  status.textContent = "";
  status.hidden = true;
  document.body.dataset.ready = "true";
}

start().catch(error => {
  document.getElementById("status").textContent = `The page could not be shown: ${error.message}`;
  throw error;
});
