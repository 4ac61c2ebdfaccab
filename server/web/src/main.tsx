/** The page: a header, and the view that the address names. */

import { render } from "preact";

import icon from "./icon.svg";
import "./style.css";
import { post } from "./api";
import { useRoute } from "./route";
import { Experiment } from "./views/experiment";
import { Experiments } from "./views/experiments";

async function signOut() {
  await post("/logout");
  location.reload(); // the address stays; nothing of an experiment does
}

function Page() {
  const route = useRoute();
  return (
    <>
      <header class="bar">
        <a href="#/" class="brand">
          <img src={icon} alt="" width="20" height="20" /> Zerolab
        </a>
        <nav>
          <a href="#/" aria-current={route.id === null ? "page" : undefined}>
            Experiments
          </a>
          <a href="/api/v1/openapi.json">REST API</a>
          <button onClick={() => void signOut()}>Sign out</button>
        </nav>
      </header>
      <main>{route.id === null ? <Experiments /> : <Experiment key={route.id} id={route.id} route={route} />}</main>
    </>
  );
}

render(<Page />, document.getElementById("page")!);
