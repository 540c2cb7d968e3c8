"use strict";
// What the page of `fastweights inspect` is made of: elements, numbers as text, the arrays of a model, and a layout of its
// characters in lines.

const NONE = 65535;  // in the place of a distance: no source
const STEPS_PER_BIT = 16;  // of a loss in one byte
const CELLS_OF_TAB = 4;

// An element with attributes and children; an attribute such as `onclick` is a listener.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A number with so many decimals, a whole number, and a byte (0 to 255) as a share in percent.
const number = (x, digits = 2) => x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const whole = x => x.toLocaleString("en");
const percent = byte => byte < 2 ? "under 1 %" : Math.round(byte / 2.55) + " %";

// A character as it is shown: control characters by a sign of their own.
function visible(character) {
  if (character === "\n") return "↵";
  if (character === "\t") return "→";
  return character.codePointAt(0) < 32 ? "·" : character;
}

// The content of a script element: base64 of gzip. The element is removed.
async function inflate(element) {
  const packed = Uint8Array.from(atob(element.textContent.trim()), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  element.remove();
  return new Response(stream).arrayBuffer();
}

// The data of one model, whose layout page_data.py describes: its header, with `arrays` as typed arrays by name. The
// arrays look into the block; an array of rows knows their `width`.
async function unpack(element) {
  const buffer = await inflate(element);
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const types = { uint8: Uint8Array, uint16: Uint16Array };
  const arrays = {};
  for (const [name, { type, at, shape }] of Object.entries(header.arrays)) {
    const size = shape.reduce((a, b) => a * b, 1);
    const array = new types[type](buffer, 4 + length + at, size);
    arrays[name] = Object.assign(array, { width: shape[1] || 1 });
  }
  return Object.assign(header, { arrays });
}

// Cells of a monospaced line that a character takes: two for East Asian characters and emoji.
function cellsOf(character) {
  const code = character.codePointAt(0);
  if (code === 9) return CELLS_OF_TAB;
  const wide = code >= 0x1100 && (code <= 0x115f || (code >= 0x2e80 && code <= 0xd7a3) || (code >= 0xf900 && code <= 0xfaff)
    || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60) || code >= 0x1f300);
  return wide ? 2 : 1;
}

// Where every character of a text stands, in lines of `columns` cells.
//   cells   cell in its line at which each character begins
//   starts  first character of each line
//   count   number of lines
class Layout {
  constructor(characters, columns) {
    this.cells = new Uint16Array(characters.length);
    const starts = [0];
    let column = 0;
    for (let i = 0; i < characters.length; i++) {
      const width = cellsOf(characters[i]);
      if (column + width > columns && column > 0) {
        starts.push(i);
        column = 0;
      }
      this.cells[i] = column;
      column += width;
      if (characters[i] === "\n") {
        starts.push(i + 1);
        column = 0;
      }
    }
    this.starts = Int32Array.from(starts);
    this.count = starts.length;
    this.total = characters.length;
  }

  // The line of character i, by bisection.
  lineOf(i) {
    let low = 0, high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= i) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The character after the last of a line.
  end(line) {
    return line + 1 < this.count ? this.starts[line + 1] : this.total;
  }

  // The character of a line that stands at a cell, or the last one before it.
  characterAt(line, cell) {
    let i = this.starts[line];
    while (i + 1 < this.end(line) && this.cells[i + 1] <= cell) i++;
    return i;
  }
}
