package install

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// testRights checks, through the API server, every verb on all resources that these accounts could use. An extra right is an
// error, and so is a missing one.
func (c *cluster) testRights(t *testing.T) {
	resources := []struct{ group, resource, name string }{
		{"", "pods", ""},
		{"", "pods/status", ""},
		{"", "pods/binding", ""},
		{"", "pods/eviction", ""},
		{"", "pods/exec", ""},
		{"", "pods/log", ""},
		{"", "pods/ephemeralcontainers", ""},
		{"", "pods/resize", ""},
		{"", "bindings", ""},
		{"", "nodes", ""},
		{"", "nodes/status", ""},
		{"", "nodes/proxy", ""},
		{"", "events", ""},
		{"", "secrets", ""},
		{"", "secrets", "gpushare-extender-tls"},
		{"", "configmaps", ""},
		{"", "services", ""},
		{"", "services", "gpushare-extender"},
		{"", "serviceaccounts/token", ""},
		{"policy", "poddisruptionbudgets", ""},
		{"coordination.k8s.io", "leases", ""},
		{"coordination.k8s.io", "leases", "gpushare-extender"},
		{"coordination.k8s.io", "leases", "kube-scheduler"},
		{"discovery.k8s.io", "endpointslices", ""},
		{"discovery.k8s.io", "endpointslices", "gpushare-extender"},
		{"apps", "daemonsets", ""},
		{"resource.k8s.io", "resourceslices", ""},
		{"resource.k8s.io", "resourceclaims", ""},
		{"rbac.authorization.k8s.io", "clusterroles", ""},
		{"admissionregistration.k8s.io", "validatingadmissionpolicies", ""},
	}
	verbs := []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
	for account, want := range map[string]map[string]string{
		"gpushare-extender": {
			"pods": "get list watch", "pods/status": "patch", "pods/binding": "create", "pods/eviction": "create",
			"nodes": "list watch patch", "events": "create patch", "poddisruptionbudgets": "list watch",
			"services gpushare-extender": "get", "leases gpushare-extender": "get list watch update",
			"endpointslices": "create", "endpointslices gpushare-extender": "get create update delete",
		},
		"gpushare-device-plugin": {
			"pods": "list watch patch", "nodes": "list watch", "nodes/status": "patch", "events": "create patch",
			"resourceslices": "list watch",
		},
	} {
		got := map[string]string{}
		for _, r := range resources {
			resource, subresource, _ := strings.Cut(r.resource, "/")
			var allowed []string
			for _, verb := range verbs {
				answer, err := c.Client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{
					Spec: authorizationv1.SubjectAccessReviewSpec{
						User:   "system:serviceaccount:" + namespace + ":" + account,
						Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
						ResourceAttributes: &authorizationv1.ResourceAttributes{
							Namespace: namespace, Verb: verb, Group: r.group, Resource: resource, Subresource: subresource, Name: r.name,
						},
					},
				}, metav1.CreateOptions{})
				must(t, err)
				if answer.Status.Allowed {
					allowed = append(allowed, verb)
				}
			}
			if len(allowed) > 0 {
				got[strings.TrimSpace(r.resource+" "+r.name)] = strings.Join(allowed, " ")
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("the rights of %s (-want +got):\n%s", account, diff)
		}
	}
}

// testPodSecurity checks the installed pods against Kubernetes' Pod Security Standards, through the API server. The
// extender's pod must meet the restricted standard. The device plugin's pod may break only the rules about host paths and
// root.
func (c *cluster) testPodSecurity(t *testing.T) {
	strict := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		Name: "strict", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}}
	_, err := c.Client.CoreV1().Namespaces().Create(t.Context(), strict, metav1.CreateOptions{})
	must(t, err)
	_, err = c.Client.CoreV1().ServiceAccounts(strict.Name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "any"}}, metav1.CreateOptions{})
	must(t, err)
	try := func(spec corev1.PodSpec) error {
		spec.ServiceAccountName, spec.DeprecatedServiceAccount = "any", ""
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: strict.Name, Name: "try"}, Spec: spec}
		_, err := c.Client.CoreV1().Pods(strict.Name).Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	extender, err := c.Client.AppsV1().Deployments(namespace).Get(t.Context(), "gpushare-extender", metav1.GetOptions{})
	must(t, err)
	if err := try(extender.Spec.Template.Spec); err != nil {
		t.Errorf("the extender: %v", err)
	}
	plugin, err := c.Client.AppsV1().DaemonSets(namespace).Get(t.Context(), "gpushare-device-plugin", metav1.GetOptions{})
	must(t, err)
	err = try(plugin.Spec.Template.Spec)
	if err == nil || !strings.Contains(err.Error(), "hostPath") || !strings.Contains(err.Error(), "runAsNonRoot") {
		t.Errorf("the device plugin: got %v, want it rejected for its host paths and for root", err)
	}
	spec := plugin.Spec.Template.Spec.DeepCopy()
	spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: new(true)}
	for i := range spec.Volumes {
		spec.Volumes[i].VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
	}
	if err := try(*spec); err != nil {
		t.Errorf("the device plugin without these two: %v", err)
	}
	must(t, c.Client.CoreV1().Namespaces().Delete(t.Context(), strict.Name, metav1.DeleteOptions{}))
}
