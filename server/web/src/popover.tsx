/** A panel below its button: closed by Escape, by a click outside, or by the button. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

interface PopoverProps {
  /** On the button, and name of the panel. */
  name: string;
  children: ComponentChildren;
}

export function Popover({ name, children }: PopoverProps) {
  const [open, setOpen] = useState(false);
  const box = useRef<HTMLSpanElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (!open) return;
    const outside = ({ target }: Event) => {
      // A dialog that was opened in the panel lies over the page.
      if (target instanceof Element && !box.current?.contains(target) && !target.closest("dialog")) setOpen(false);
    };
    const escape = (event: KeyboardEvent) => {
      if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
      setOpen(false);
      button.current?.focus();
    };
    document.addEventListener("pointerdown", outside);
    document.addEventListener("focusin", outside);
    document.addEventListener("keydown", escape);
    box.current?.querySelector<HTMLElement>(".panel :is(input, a, button)")?.focus();
    return () => {
      document.removeEventListener("pointerdown", outside);
      document.removeEventListener("focusin", outside);
      document.removeEventListener("keydown", escape);
    };
  }, [open]);
  return (
    <span class="popover" ref={box}>
      <button type="button" ref={button} aria-expanded={open} onClick={() => setOpen(!open)}>
        {name}
      </button>
      {open && (
        <div class="panel" role="group" aria-label={name}>
          {children}
        </div>
      )}
    </span>
  );
}
