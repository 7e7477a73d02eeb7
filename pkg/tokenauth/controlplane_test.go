package tokenauth

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/controlplane"
)

// TestReviewWithAPIServer checks both reviews against a real API server, with an account that has the chart's rights.
func TestReviewWithAPIServer(t *testing.T) {
	c := controlplane.StartForTest(t, controlplane.Options{WithoutScheduler: true})
	token := func(name string, rules ...rbacv1.PolicyRule) string {
		t.Helper()
		meta := metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: name}
		_, err := c.Client.CoreV1().ServiceAccounts(meta.Namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: meta}, metav1.CreateOptions{})
		must(t, err)
		_, err = c.Client.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}, metav1.CreateOptions{})
		must(t, err)
		_, err = c.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: meta.Namespace, Name: name}},
		}, metav1.CreateOptions{})
		must(t, err)
		kubeconfig, err := c.ServiceAccountKubeconfig(t.Context(), meta.Namespace, name)
		must(t, err)
		config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
		must(t, err)
		return config.BearerToken
	}
	create := func(group, resource string) rbacv1.PolicyRule {
		return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: []string{"create"}}
	}
	config := rest.AnonymousClientConfig(c.Config)
	config.BearerToken = token("gpushare-extender", create("authentication.k8s.io", "tokenreviews"), create("authorization.k8s.io", "subjectaccessreviews"))
	reviewer, err := New(config)
	must(t, err)
	for name, test := range map[string]struct {
		token string
		want  int
	}{
		"a reader":         {token("reader", rbacv1.PolicyRule{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}), 200},
		"another":          {token("another"), 403},
		"an unknown token": {"nonsense", 401},
	} {
		if w := ask(reviewer, "Bearer "+test.token); w.Code != test.want {
			t.Errorf("%s: %d %s, want %d", name, w.Code, w.Body, test.want)
		}
	}
}

var must = check.Must
