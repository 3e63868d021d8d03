// Keeps the files of an export, so that the page is there without a network; DIGEST and FILES stand before this line.
const prefix = `trainledger ${registration.scope} `, name = prefix + DIGEST;

addEventListener("install", (event) => {
  event.waitUntil(caches.open(name).then((cache) => cache.addAll(FILES)).then(() => skipWaiting()));
});
addEventListener("activate", (event) => {
  const drop = (names) => Promise.all(names.filter((each) => each.startsWith(prefix) && each !== name).map((each) => caches.delete(each)));
  event.waitUntil(caches.keys().then(drop).then(() => clients.claim()));
});
addEventListener("fetch", (event) => {
  const kept = caches.open(name).then((cache) => cache.match(event.request, { ignoreSearch: true }));
  event.respondWith(kept.then((found) => found ?? fetch(event.request)));
});
