/** The page: a header, and the view that the address names. */

import { render } from "preact";
import { useEffect } from "preact/hooks";

import icon from "./icon.svg";
import "./style.css";
import { Caller, useWhoami } from "./views/users/access";
import { get, post } from "./api";
import { Choices, type Route, useRoute } from "./route";
import { choose, follow, THEMES, useTheme } from "./theme";
import { Lazy, Select } from "./parts";
import { useLoaded } from "./live";
import type { Info } from "./resources";
import { Cluster } from "./views/cluster";
import { Compare } from "./views/compare";
import { Experiment } from "./views/experiment";
import { Experiments } from "./views/experiments";
import { Model, Models } from "./views/registry/models";
import { Trial } from "./views/trial";

/** Nothing of an experiment stays; one who is not signed in gets an error from the next request. */
function signOut(): void {
  const load = () => window.location.reload();
  post("/logout").then(load, load);
}

const projects = () => import("./views/users/projects").then((module) => module.Projects);
const users = () => import("./views/users/users").then((module) => module.Users);

const opened = () => import("./views/team").then((module) => module.Opened);

function Page() {
  const route = useRoute();
  const theme = useTheme();
  const whoami = useWhoami();
  const caller = whoami.value;
  const known = caller !== null || whoami.error !== null;
  const visitor = caller?.kind === "share";
  const info = useLoaded(`info ${known} ${visitor}`, () => (known && !visitor ? get<Info>("/info") : Promise.resolve(null)), String(route.page === "home"));
  const several = (info.value?.projects ?? 1) > 1;
  const home = route.page === "home";
  const opensProjects = home && several && route.choices.size === 0;
  useEffect(() => {
    if (opensProjects) window.location.replace("#/projects");
  }, [opensProjects]);
  const loading = !known || opensProjects || (home && !visitor && info.value === null && info.error === null);
  return (
    <Choices.Provider value={route.choices}>
      <header class="bar">
        <a href="#/" class="brand">
          <img src={icon} alt="" width="20" height="20" /> Zerolab
        </a>
        {visitor ? (
          <span class="muted">Shared results, read-only{caller.expires_at && `, until ${caller.expires_at.slice(0, 10)}`}</span>
        ) : (
        <nav>
          {several && (
            <a href="#/projects" aria-current={route.page === "projects" ? "page" : undefined}>
              Projects
            </a>
          )}
          <a href={several ? "#/experiments" : "#/"} aria-current={home || route.page === "list" ? "page" : undefined}>
            Experiments
          </a>
          <a href="#/cluster" aria-current={route.page === "cluster" ? "page" : undefined}>
            Cluster
          </a>
          <a href="#/models" aria-current={route.page === "models" ? "page" : undefined}>
            Models
          </a>
          {caller?.shared && (
            <a href="#/users" aria-current={route.page === "users" ? "page" : undefined}>
              {caller.role === "admin" ? "Admin" : "Users"}
            </a>
          )}
          <a href="/docs/">
            Docs {info.value && <small class="muted wide-only">{info.value.version}</small>}
          </a>
        </nav>
        )}
        <span class="end">
          <Select name="theme" value={theme} options={THEMES} choose={choose} />
        </span>
        {caller?.shared && caller.user && (
          <small class="muted wide-only" title={`role: ${caller.role}`}>
            {caller.user}
          </small>
        )}
        {!visitor && (
          <button type="button" class="bare" onClick={signOut}>
            Sign out
          </button>
        )}
      </header>
      <main>
        <Caller.Provider value={caller}>
          {loading ? <p class="muted">Loading…</p> : <View route={route} several={several} />}
        </Caller.Provider>
      </main>
    </Choices.Provider>
  );
}

function View({ route, several }: { route: Route; several: boolean }) {
  if (route.page === "home" || route.page === "list") return <Experiments several={several} />;
  if (route.page === "projects") return <Lazy key="projects" load={projects} with={{}} />;
  if (route.page === "cluster") return <Cluster />;
  if (route.page === "models") return <Models />;
  if (route.page === "users") return <Lazy key="users" load={users} with={{}} />;
  if (route.page === "model") return <Model key={route.name} name={route.name} />;
  if (route.page === "trial") return <Trial key={route.id} id={route.id} tab={route.tab} />;
  if (route.page === "compare") return <Compare ids={route.ids} />;
  if (route.page === "experiment") return <Experiment key={route.id} id={route.id} route={route} />;
  return (
    <div class="notice bad" role="alert">
      Page not found: <code>{window.location.hash}</code>. <a href="#/">All experiments</a>
    </div>
  );
}

/** A share link is exchanged for a cookie before anything else is asked for. */
function Root() {
  const route = useRoute();
  if (route.page === "shared") {
    return (
      <main>
        <Lazy key={route.token} load={opened} with={{ token: route.token }} />
      </main>
    );
  }
  return <Page />;
}

follow();
render(<Root />, document.getElementById("page")!);
