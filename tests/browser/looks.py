"""What is looked for in a page that a browser shows: what is too wide, and what is hard to read."""

from __future__ import annotations

LEAST = 4.5  # contrast of text, as WCAG 2 AA asks for

# Elements that stand out of the window, but for those in something that scrolls sideways or cuts them off.
TOO_WIDE = """(() => {
  const wide = innerWidth, found = [];
  const page = document.scrollingElement.scrollWidth;
  if (page > wide) found.push(`the page is ${page} wide`);
  const inScroller = e => {
    for (let p = e.parentElement; p && p !== document.body; p = p.parentElement)
      if (getComputedStyle(p).overflowX !== 'visible' && p.getBoundingClientRect().right <= wide + 1) return true;
    return false;
  };
  for (const e of document.body.querySelectorAll('*')) {
    const box = e.getBoundingClientRect();
    if (!box.width || (box.right <= wide + 1 && box.left >= -1) || inScroller(e)) continue;
    found.push(`${e.tagName}.${e.getAttribute('class') || ''} ${Math.round(box.left)}..${Math.round(box.right)} `
      + (e.textContent || '').trim().slice(0, 60));
  }
  return found.slice(0, 10);
})()"""

# Text with less contrast than LEAST against what lies below it: backgrounds of boxes, and shapes of a drawing.
HARD_TO_READ = """(() => {
  const parse = text => {
    const n = (text.match(/[\\d.]+/g) || []).map(Number);
    return text.startsWith('rgb') ? [n[0], n[1], n[2], n.length > 3 ? n[3] : 1] : null;
  };
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const contrast = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((m, n) => n - m);
    return (high + 0.05) / (low + 0.05);
  };
  const shapes = (e, x, y) => {
    const svg = e.closest('svg');
    if (!svg) return [];
    return [...svg.querySelectorAll('rect,circle')].filter(s => {
      const b = s.getBoundingClientRect();
      return s.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING
        && b.left <= x && x <= b.right && b.top <= y && y <= b.bottom;
    }).map(s => {
      const style = getComputedStyle(s), fill = parse(style.fill);
      return fill && [fill[0], fill[1], fill[2], fill[3] * style.fillOpacity * style.opacity];
    }).filter(Boolean);
  };
  const below = (e, x, y) => {
    const layers = shapes(e, x, y);
    for (let p = e; p; p = p.parentElement) {
      const back = parse(getComputedStyle(p).backgroundColor);
      if (back && back[3]) { layers.unshift(back); if (back[3] === 1) break; }
    }
    const paper = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    return layers.reduce((under, layer) => over(layer, under), paper);
  };
  const found = [];
  let read = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement, words = node.nodeValue.trim();
    if (!words || e.closest('style,title,script')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), style = getComputedStyle(e);
    if (!box.width || style.visibility === 'hidden') continue;
    const back = below(e, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
    const color = parse(e.closest('svg') && e.namespaceURI.endsWith('svg') ? style.fill : style.color);
    if (!color) { found.push(`no colour: ${words.slice(0, 40)}`); continue; }
    read += 1;
    const ratio = contrast(over(color, back), back);
    if (ratio < LEAST) found.push(`${ratio.toFixed(2)} ${e.tagName}.${e.getAttribute('class') || ''}: `
      + `${words.slice(0, 40)} (${color.slice(0, 3)} on ${back.slice(0, 3).map(Math.round)})`);
  }
  return {read, found: [...new Set(found)].slice(0, 12)};
})()""".replace("LEAST", str(LEAST))
