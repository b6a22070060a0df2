// Every visible text against what lies behind it: {seen, bad}. Large text (24 px, or 18.7 px bold) needs 3, other text 4.5 (WCAG 2 AA).
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (text) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, under) => top.slice(0, 3).map((c, n) => c * top[3] + under[n] * (1 - top[3]));
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    const layers = [];
    for (let e = node; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const bad = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim();
    const node = walker.currentNode.parentElement;
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    if (!text || !box.width || !box.height || style.visibility !== "visible") continue;
    if (node.closest(".hidden, script, dialog:not([open]), .skip, option")) continue;
    const ground = behind(node);
    const ink = over(parse(node.namespaceURI.includes("svg") ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen++;
    if (ratio < (large ? 3 : 4.5)) bad.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)} ${style.color} on ${ground}`);
  }
  return { seen, bad };
})()
