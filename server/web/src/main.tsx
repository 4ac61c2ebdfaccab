/** The page: a header, and the view that the address after `#` names. */

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";

import "./style.css";
import { Experiment } from "./views/experiment";
import { Experiments } from "./views/experiments";

function useHash(): string {
  const [hash, setHash] = useState(window.location.hash);
  useEffect(() => {
    const changed = () => setHash(window.location.hash);
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return hash;
}

function View({ hash }: { hash: string }) {
  const experiment = /^#\/experiments\/(\d+)/.exec(hash);
  if (experiment) return <Experiment key={experiment[1]} id={Number(experiment[1])} />;
  return <Experiments />;
}

function Page() {
  const hash = useHash();
  return (
    <>
      <header class="bar">
        <a href="#/" class="brand">
          <img src="/static/icon.svg" alt="" width="20" height="20" /> Zerolab
        </a>
        <nav>
          <a href="#/" aria-current={hash === "" || hash === "#/" ? "page" : undefined}>
            experiments
          </a>
          <a href="/docs">REST</a>
        </nav>
      </header>
      <main>
        <View hash={hash} />
      </main>
    </>
  );
}

render(<Page />, document.getElementById("page")!);
