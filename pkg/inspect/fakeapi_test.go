package inspect

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// fakeAPI implements the part of an API server that the command uses, over HTTP and JSON: get, list in pages, watch, label
// selectors and field selectors.
type fakeAPI struct {
	*httptest.Server
	maxPage int // The maximum page size, even if the client requests more.

	mu       sync.Mutex // Guards the fields below.
	version  int
	nodes    map[string]*corev1.Node
	pods     map[string]*corev1.Pod
	history  []change
	watchers map[chan change]struct{}
	requests []string
	refuse   int // If not zero, the status of all responses.
}

type change struct {
	kind    string // ADDED, MODIFIED or DELETED
	object  metav1.Object
	version int
}

func newFakeAPI(t *testing.T, objects Objects) *fakeAPI {
	api := &fakeAPI{
		maxPage: 500, version: 100,
		nodes: map[string]*corev1.Node{}, pods: map[string]*corev1.Pod{}, watchers: map[chan change]struct{}{},
	}
	for _, n := range objects.Nodes {
		api.put(n)
	}
	for _, p := range objects.Pods {
		api.put(p)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/nodes/{name}", api.getNode)
	mux.HandleFunc("GET /api/v1/nodes", func(w http.ResponseWriter, r *http.Request) { api.collection(w, r, "NodeList", isNode) })
	mux.HandleFunc("GET /api/v1/namespaces", api.listNamespaces)
	mux.HandleFunc("GET /api/v1/pods", func(w http.ResponseWriter, r *http.Request) { api.collection(w, r, "PodList", isPod) })
	api.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		api.mu.Lock()
		api.requests = append(api.requests, r.URL.RequestURI())
		refuse := api.refuse
		api.mu.Unlock()
		if refuse != 0 {
			http.Error(w, "refused by the test", refuse)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		api.CloseClientConnections()
		api.Close()
	})
	return api
}

func isNode(o metav1.Object) bool { _, ok := o.(*corev1.Node); return ok }
func isPod(o metav1.Object) bool  { _, ok := o.(*corev1.Pod); return ok }

// unwrap returns the object of a builder.
func unwrap(object metav1.Object) metav1.Object {
	switch o := object.(type) {
	case nodeBuilder:
		return o.Node
	case podBuilder:
		return o.Pod
	}
	return object
}

// put creates or updates an object and notifies the watchers.
func (api *fakeAPI) put(object metav1.Object) {
	api.mu.Lock()
	defer api.mu.Unlock()
	api.version++
	kind := "MODIFIED"
	switch o := unwrap(object).(type) {
	case *corev1.Node:
		o = o.DeepCopy()
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
		if api.nodes[o.Name] == nil {
			kind = "ADDED"
		}
		api.nodes[o.Name] = o
		api.notify(kind, o)
	case *corev1.Pod:
		o = o.DeepCopy()
		o.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
		key := o.Namespace + "/" + o.Name
		if api.pods[key] == nil {
			kind = "ADDED"
		}
		api.pods[key] = o
		api.notify(kind, o)
	}
}

func (api *fakeAPI) remove(object metav1.Object) {
	api.mu.Lock()
	defer api.mu.Unlock()
	api.version++
	switch o := unwrap(object).(type) {
	case *corev1.Node:
		gone := api.nodes[o.Name]
		delete(api.nodes, o.Name)
		api.notify("DELETED", gone.DeepCopy())
	case *corev1.Pod:
		gone := api.pods[o.Namespace+"/"+o.Name]
		delete(api.pods, o.Namespace+"/"+o.Name)
		api.notify("DELETED", gone.DeepCopy())
	}
}

// notify records a change and sends it to the watchers. The caller holds mu. The channels are large enough for all tests.
func (api *fakeAPI) notify(kind string, object metav1.Object) {
	object.SetResourceVersion(strconv.Itoa(api.version))
	c := change{kind, object, api.version}
	api.history = append(api.history, c)
	for watcher := range api.watchers {
		watcher <- c
	}
}

// answerWith makes all further requests fail with an HTTP status, and ends the watches. Zero restores normal operation.
func (api *fakeAPI) answerWith(status int) {
	api.mu.Lock()
	defer api.mu.Unlock()
	api.refuse = status
	for watcher := range api.watchers {
		close(watcher)
	}
	clear(api.watchers)
}

func (api *fakeAPI) seen() []string {
	api.mu.Lock()
	defer api.mu.Unlock()
	return slices.Clone(api.requests)
}

func (api *fakeAPI) getNode(w http.ResponseWriter, r *http.Request) {
	api.mu.Lock()
	node := api.nodes[r.PathValue("name")]
	api.mu.Unlock()
	if node == nil {
		status := apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, r.PathValue("name")).Status()
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		reply(w, http.StatusNotFound, status)
		return
	}
	reply(w, http.StatusOK, node)
}

// listNamespaces responds with the namespaces of all pods.
func (api *fakeAPI) listNamespaces(w http.ResponseWriter, _ *http.Request) {
	api.mu.Lock()
	names := map[string]bool{}
	for _, p := range api.pods {
		names[p.Namespace] = true
	}
	api.mu.Unlock()
	list := corev1.NamespaceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		list.Items = append(list.Items, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	reply(w, http.StatusOK, list)
}

func (api *fakeAPI) collection(w http.ResponseWriter, r *http.Request, kind string, isKind func(metav1.Object) bool) {
	query := r.URL.Query()
	if query.Get("sendInitialEvents") != "" { // As servers without streaming lists do; clients list instead.
		status := apierrors.NewBadRequest("sendInitialEvents is not supported").Status()
		status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		reply(w, http.StatusBadRequest, status)
		return
	}
	labelled, err1 := labels.Parse(query.Get("labelSelector"))
	fielded, err2 := fields.ParseSelector(query.Get("fieldSelector"))
	if err1 != nil || err2 != nil {
		http.Error(w, "bad selector", http.StatusBadRequest)
		return
	}
	selected := func(o metav1.Object) bool {
		return labelled.Matches(labels.Set(o.GetLabels())) && fielded.Matches(fieldsOf(o))
	}
	if query.Get("watch") != "" {
		api.watch(w, r, isKind, selected)
		return
	}
	api.list(w, query.Get("limit"), query.Get("continue"), kind, func(o metav1.Object) bool { return isKind(o) && selected(o) })
}

func fieldsOf(object metav1.Object) fields.Set {
	set := fields.Set{"metadata.name": object.GetName()}
	if pod, ok := object.(*corev1.Pod); ok {
		set["spec.nodeName"], set["status.phase"] = pod.Spec.NodeName, string(pod.Status.Phase)
	}
	return set
}

func (api *fakeAPI) list(w http.ResponseWriter, limit, from, kind string, selected func(metav1.Object) bool) {
	api.mu.Lock()
	defer api.mu.Unlock()
	var items []metav1.Object
	for _, n := range api.nodes {
		if selected(n) {
			items = append(items, n)
		}
	}
	for _, p := range api.pods {
		if selected(p) {
			items = append(items, p)
		}
	}
	slices.SortFunc(items, func(a, b metav1.Object) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	start, _ := strconv.Atoi(from)
	meta := map[string]string{"resourceVersion": strconv.Itoa(api.version)}
	items = items[min(start, len(items)):]
	if n, _ := strconv.Atoi(limit); n > 0 && len(items) > min(n, api.maxPage) {
		items = items[:min(n, api.maxPage)]
		meta["continue"] = strconv.Itoa(start + len(items))
	}
	if items == nil {
		items = []metav1.Object{}
	}
	reply(w, http.StatusOK, map[string]any{"apiVersion": "v1", "kind": kind, "metadata": meta, "items": items})
}

// watch streams the changes of one kind since the resource version of the request.
func (api *fakeAPI) watch(w http.ResponseWriter, r *http.Request, isKind, selected func(metav1.Object) bool) {
	since, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	changes := make(chan change, 1000)
	api.mu.Lock()
	for _, c := range api.history {
		if c.version > since {
			changes <- c
		}
	}
	api.watchers[changes] = struct{}{}
	api.mu.Unlock()
	defer func() {
		api.mu.Lock()
		delete(api.watchers, changes)
		api.mu.Unlock()
	}()

	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	_ = flusher.Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case c, open := <-changes:
			if !open {
				return
			}
			if !isKind(c.object) {
				continue
			}
			if !selected(c.object) {
				c.kind = "DELETED" // An object that no longer matches is deleted for this watcher.
			}
			_ = json.NewEncoder(w).Encode(map[string]any{"type": c.kind, "object": c.object})
			_ = flusher.Flush()
		}
	}
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
