/** Light, dark, or as the system is: chosen here, and remembered by the browser. */

import { useEffect, useState } from "preact/hooks";

export const THEMES: [string, string][] = [
  ["", "Theme: system"],
  ["light", "Theme: light"],
  ["dark", "Theme: dark"],
];

const KEY = "zerolab-theme";
const CHANGED = "themechange";
const system = window.matchMedia("(prefers-color-scheme: dark)");

/** What was chosen; a browser that keeps nothing follows the system. */
function chosen(): string {
  try {
    const found = window.localStorage.getItem(KEY) ?? "";
    return THEMES.some(([name]) => name === found) ? found : "";
  } catch {
    return "";
  }
}

const isDark = (): boolean => document.documentElement.dataset.theme === "dark";

/** Put the page in its colours; the style sheet and the drawings look at `data-theme` alone. */
function paint(theme: string): void {
  document.documentElement.dataset.theme = theme || (system.matches ? "dark" : "light");
  window.dispatchEvent(new Event(CHANGED));
}

let kept = chosen(); // what cannot be stored holds until the page is left

export function choose(theme: string): void {
  kept = theme;
  try {
    if (theme) window.localStorage.setItem(KEY, theme);
    else window.localStorage.removeItem(KEY);
  } catch {
    // a browser that keeps nothing
  }
  paint(theme);
}

export function follow(): void {
  system.addEventListener("change", () => paint(kept));
  // Another tab of this page chose.
  window.addEventListener("storage", (event) => event.key === KEY && paint((kept = chosen())));
  paint(kept);
}

/** What was chosen, as it changes. */
export function useTheme(): string {
  const [, again] = useState(0);
  useEffect(() => watch(() => again((count) => count + 1)), []);
  return kept;
}

/** Whether the page is dark; changes redraw. */
export function useDark(): boolean {
  const [dark, setDark] = useState(isDark);
  useEffect(() => watch(() => setDark(isDark())), []);
  return dark;
}

function watch(changed: () => void): () => void {
  window.addEventListener(CHANGED, changed);
  return () => window.removeEventListener(CHANGED, changed);
}
